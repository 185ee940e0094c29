"""A gateway that runs nothing, to measure the client alone: never part of a service.

    python -m rollyard_loadtest.null_gateway --uds PATH [--delay-ms 50] [--capacity RUNS]

Speaks ``POST /v1/batches`` with NDJSON. Every run is answered ``ok`` after the delay. With a
capacity it holds no more runs than that at once, and refuses a batch beyond it with 429, whole,
as the real one does. ``GET /v1/stats`` counts what it saw.
"""

import argparse
import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

_ID = re.compile(rb'"run_id":"([^"]+)"')
_RESULT = (
    b'{"run_id":"%b","outcome":"ok","exit_code":0,"stdout":"3628800\\n","wall_ms":3.2,'
    b'"cpu_ms":2.9,"peak_memory_bytes":9437184,"queued_ms":12.5,"worker_id":"host-4242-0",'
    b'"template":"bare"}\n'
)

Message = dict[str, Any]


class NullGateway:
    """The ASGI application."""

    def __init__(self, *, delay_s: float, capacity: int | None) -> None:
        self._delay_s = delay_s
        self._capacity = capacity
        self._held = 0
        self._seen = {"requests": 0, "runs": 0, "refused_requests": 0, "refused_runs": 0}

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] != "/v1/batches":
            await _whole(send, 200, json.dumps(self._seen).encode())
            return
        ids = _ID.findall(body)
        self._seen["requests"] += 1
        self._seen["runs"] += len(ids)
        if self._capacity is not None and self._held + len(ids) > self._capacity:
            self._seen["refused_requests"] += 1
            self._seen["refused_runs"] += len(ids)
            await _whole(send, 429, b'{"error":"overloaded","message":"full","retry_after_s":0.1}')
            return
        self._held += len(ids)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await asyncio.sleep(self._delay_s)
            lines = b"".join(_RESULT % run_id for run_id in ids)
            await send({"type": "http.response.body", "body": lines})
        finally:
            self._held -= len(ids)


async def _whole(send: Callable[[Message], Awaitable[None]], status: int, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--uds", required=True)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--capacity", type=int)
    options = parser.parse_args()
    app = NullGateway(delay_s=options.delay_ms / 1000, capacity=options.capacity)
    uvicorn.run(
        app,  # pyright: ignore[reportArgumentType]
        uds=options.uds,
        log_config=None,
        lifespan="off",
        ws="none",
        backlog=4096,
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
