"""A scripted HTTP peer: speaks the batch protocol over a real socket, and fails as told.

It is no gateway and runs no program: a run's stdout is its code. What it is for is the faults
that a real gateway shows too seldom to wait for.
"""

import asyncio
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import uvicorn

Json = dict[str, Any]
Message = Json
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


@dataclass
class Seen:
    """A request that arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when its client hung up before the answer ended."""

    @property
    def runs(self) -> list[Json]:
        return cast("list[Json]", json.loads(self.body)["runs"])

    @property
    def ids(self) -> list[str]:
        return [run["run_id"] for run in self.runs]


@dataclass
class Reply:
    """One request being answered by a script."""

    peer: "Peer"
    seen: Seen
    send: Send

    async def start(self, status: int = 200, headers: dict[str, str] | None = None) -> None:
        kind = "application/x-ndjson" if status == 200 else "application/json"
        pairs = {"content-type": kind, **(headers or {})}
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(k.encode(), v.encode()) for k, v in pairs.items()],
            }
        )

    async def write(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self.send({"type": "http.response.body", "body": data})

    async def line(self, run: Json) -> None:
        await self.write(json.dumps(self.peer.result(run)).encode() + b"\n")

    def cut(self, *, reset: bool) -> None:
        """Break the connection, with a TCP reset or a plain close."""
        transport: asyncio.Transport = self.send.__self__.transport  # type: ignore[attr-defined]
        sock: socket.socket = transport.get_extra_info("socket")
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


Script = Callable[[Reply], Awaitable[None]]


async def answer(reply: Reply) -> None:
    """All results, in one piece."""
    await reply.start()
    results = [reply.peer.result(run) for run in reply.seen.runs]
    await reply.end(b"".join(json.dumps(result).encode() + b"\n" for result in results))


def refuse(status: int, error: str = "", problems: Sequence[Json] = (), **headers: str) -> Script:
    """An error answer; keyword names are headers (``retry_after="1"``)."""

    async def script(reply: Reply) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await reply.start(status, named)
        body = {"error": error or "unavailable", "message": f"scripted {status}"}
        more = {"request_id": "req-1", "problems": problems}
        await reply.end(json.dumps({**body, **more}).encode())

    return script


def refuse_runs(places: Callable[[list[Json]], list[int]], *, named: bool = True) -> Script:
    """422 for the runs at ``places``, if there are any, and results otherwise."""

    async def script(reply: Reply) -> None:
        bad = places(reply.seen.runs)
        if not bad:
            await answer(reply)
            return
        problems = [
            {"field": f"runs.{place}.limits.timeout_s", "message": "above the maximum"}
            for place in bad
        ]
        body = {"error": "invalid_request", "message": "a run is malformed"}
        await reply.start(422)
        await reply.end(json.dumps({**body, "problems": problems if named else []}).encode())

    return script


def cut_after(lines: int, *, reset: bool = True) -> Script:
    """Some results, then the connection breaks."""

    async def script(reply: Reply) -> None:
        if lines:
            await reply.start()
            for run in reply.seen.runs[:lines]:
                await reply.line(run)
        reply.cut(reset=reset)

    return script


def end_after(lines: int, tail: bytes = b"") -> Script:
    """Some results, then ``tail``, then a well-formed end of the answer."""

    async def script(reply: Reply) -> None:
        await reply.start()
        for run in reply.seen.runs[:lines]:
            await reply.line(run)
        await reply.end(tail)

    return script


class Gate:
    """Holds scripts until the test opens it; usable from every thread and loop."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        await asyncio.to_thread(self._open.wait, 30)


def hold(gates: dict[str, Gate]) -> Script:
    """Each run whose code is in ``gates`` is answered when its gate opens, the others at once."""

    async def script(reply: Reply) -> None:
        reply.peer.gates.extend(gates.values())
        await reply.start()

        async def one(run: Json) -> None:
            if run["code"] in gates:
                await gates[run["code"]].passed()
            await reply.line(run)

        await asyncio.gather(*(one(run) for run in reply.seen.runs))
        await reply.end()

    return script


def hold_body(gate: Gate) -> Script:
    """An answer whose body comes when the gate opens."""

    async def script(reply: Reply) -> None:
        reply.peer.gates.append(gate)
        await reply.start()
        await gate.passed()
        await reply.end(b"{}")

    return script


class Peer:
    """The server. ``scripts`` answer successive batches; after the last, ``always`` does."""

    def __init__(self) -> None:
        self.requests: list[Seen] = []
        self.scripts: deque[Script] = deque()
        self.always: Script = answer
        self.short_scripts: deque[Script] = deque()
        """The same for all other requests."""
        self.result: Callable[[Json], Json] = lambda run: {
            "run_id": run["run_id"],
            "outcome": "ok",
            "exit_code": 0,
            "stdout": run["code"],
        }
        self.url = ""
        self.gates: list[Gate] = []
        self._changed = threading.Condition()

    @property
    def batches(self) -> list[Seen]:
        return self.of("POST")

    @property
    def deletes(self) -> list[str]:
        return [seen.path.rpartition("/")[2] for seen in self.of("DELETE")]

    def of(self, method: str) -> list[Seen]:
        with self._changed:
            return [seen for seen in self.requests if seen.method == method]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 20) -> None:
        """Wait for something that requests bring about."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s)

    async def until(self, condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(self.wait_until, condition)

    async def __call__(self, scope: Json, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        seen = Seen(scope["method"], scope["path"], headers, bytes(body))
        with self._changed:
            self.requests.append(seen)
            self._changed.notify_all()
        watcher = asyncio.ensure_future(self._watch(receive, seen))
        try:
            await self._script(seen)(Reply(self, seen, send))
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive, seen: Seen) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        with self._changed:
            seen.gone.set()
            self._changed.notify_all()

    def _script(self, seen: Seen) -> Script:
        if seen.path == "/v1/batches":
            return self.scripts.popleft() if self.scripts else self.always
        return self.short_scripts.popleft() if self.short_scripts else _short_answer


async def _short_answer(reply: Reply) -> None:
    path = reply.seen.path
    known = {"/healthz": {}, "/readyz": {}, "/v1/stats": {"queued": 3, "in_flight": 1}}
    if reply.seen.method == "DELETE" and not path.endswith("unknown"):
        known = {path: {"state": "running"}}
    await reply.start(200 if path in known else 404)
    await reply.end(json.dumps(known.get(path, {"message": "not found"})).encode())


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class Serving:
    """A peer behind uvicorn in a thread; use with ``with``."""

    def __init__(self, peer: Peer, *, uds: str | None = None, port: int = 0) -> None:
        self._peer = peer
        self._port = port
        self._uds = uds
        config = uvicorn.Config(
            peer,  # pyright: ignore[reportArgumentType]
            uds=uds,
            log_config=None,
            ws="none",
            lifespan="off",
            loop="asyncio",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Peer:
        if self._uds is None:
            self._listener = socket.create_server(("127.0.0.1", self._port), backlog=1024)
            self._peer.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._peer.url = f"unix://{self._uds}"
        self._thread.start()
        assert self._server.listening.wait(20)
        return self._peer

    def _run(self) -> None:
        self._server.run(sockets=[self._listener] if self._listener else None)

    def __exit__(self, *_: object) -> None:
        for gate in self._peer.gates:
            gate.open()
        self._server.should_exit = True
        self._thread.join(30)
        if self._listener is not None:
            self._listener.close()
