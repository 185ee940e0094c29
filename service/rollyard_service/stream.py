"""The two answers to a batch: whole when all is done, or a line for each run as it ends."""

import asyncio
import logging
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollyard_service.call import Call
from rollyard_service.exchange import Exchange
from rollyard_service.refusal import unavailable
from rollyard_service.verdict import infra_error

NDJSON = b"application/x-ndjson"
WATCH_AFTER_S = 0.05
"""Seconds until somebody looks whether the caller is still there."""
STALL_S = 60.0
"""Seconds in which a caller must take some of a stream; its results wait in memory meanwhile."""

logger = logging.getLogger(__name__)


class watching:
    """End the call's wait early if its caller goes away within the block.

    Looked for only after WATCH_AFTER_S: what is answered before needs no task for it.
    """

    __slots__ = ("_call", "_receive", "_timer", "_watcher")

    def __init__(self, receive: Receive, call: Call) -> None:
        self._receive = receive
        self._call = call
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _start(self) -> None:
        self._watcher = asyncio.create_task(_watch(self._receive, self._call))


async def _watch(receive: Receive, call: Call) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call.hang_up()


async def whole(receive: Receive, exchange: Exchange, call: Call) -> list[bytes]:
    """Wait for all results of a submitted call; in the order of the request.

    Empty if the caller went away. The call is dropped in any case.

    Raises:
        Refusal: 503 when the process stops first; the runs go on, and a repeated request joins
            them through another gateway.
    """
    try:
        with watching(receive, call):
            await call.changed()
    finally:
        # Stopping is no reason to throw work away that the caller can still have.
        exchange.drop(call, abandon=not call.stopping)
    if call.done:
        return call.in_order()
    if call.gone:
        return []
    raise unavailable("this gateway is stopping; send the same run ids again")


class ResultStream(Response):
    """NDJSON: one RunResult a line, each sent as soon as it exists, one for every run.

    What breaks on our side gets a line with outcome ``infra_error``. When this process stops
    first, the stream is cut instead: the connection closes before the answer is complete, the
    runs go on, and a caller that sends their ids again joins them through another gateway. A
    caller that goes away, or stops reading, has its runs cancelled.
    """

    media_type = NDJSON.decode()

    def __init__(self, exchange: Exchange, call: Call) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"  # nginx would hold the lines back
        self._exchange = exchange
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # Headers leave at once, so that the caller knows its batch is admitted.
            await _send_lines(send, ())
            with watching(receive, call):
                await self._forward(send)
        except TimeoutError:
            logger.warning("stream.stalled", extra={"runs": len(call.pending)})
            return  # unfinished: the server closes the connection, and the caller sees the cut
        finally:
            # Stopping is no reason to throw work away that the caller can still have.
            self._exchange.drop(call, abandon=call.gone or not call.stopping)
        if call.done:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif not call.gone:
            logger.info("stream.cut", extra={"runs": len(call.pending)})

    async def _forward(self, send: Send) -> None:
        call = self._call
        try:
            while not (call.done or call.gone or call.stopping):
                await call.changed()
                await _send_lines(send, call.take())
        except TimeoutError:
            raise
        except Exception:
            logger.exception("stream.failed")
            message = "internal error of the gateway"
            for run_id in list(call.pending):
                call.deliver(run_id, infra_error(run_id, message))
        if not call.gone:
            await _send_lines(send, call.take())


async def _send_lines(send: Send, lines: Iterable[bytes]) -> None:
    body = b"".join(_line(line) for line in lines)
    async with asyncio.timeout(STALL_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _line(result: bytes) -> bytes:
    # JSON text may hold line breaks between its tokens (never inside strings).
    return (result.replace(b"\n", b" ") if b"\n" in result else result) + b"\n"
