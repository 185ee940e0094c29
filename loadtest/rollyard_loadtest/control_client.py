"""A bare HTTP/1.1 load generator: its CPU must be small beside what it measures.

One request at a time on each keep-alive connection, closed loop or all at once. Requests are made
from one template by replacing a number of fixed width; answers are counted with C loops, and every
run id that was sent must come back exactly once, with outcome ``ok``.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

_NUMBER = b"@#@#@#@#"  # replaced by the request's number, eight digits
_ID = re.compile(rb'"run_id":"([^"]+)"')
_OK = b'"outcome":"ok"'
_END = b"\r\n0\r\n\r\n"


@dataclass
class Tally:
    """What came back."""

    runs: int = 0
    refused: dict[int, int] = field(default_factory=dict[int, int])
    wrong: int = 0
    latencies_s: list[float] = field(default_factory=list[float])
    """One for each request: from its send, or the intended time of that, to its answer."""
    refusals_s: list[float] = field(default_factory=list[float])


def request_template(*, path: str, batch: int, stream: bool, code: str, ids: bool = True) -> bytes:
    """A whole request with _NUMBER in place of each request's own number."""
    runs = [
        b'{"run_id":"b-%b-%d","code":"%b"}' % (_NUMBER, index, code.encode())
        if ids
        else b'{"code":"%b"}' % code.encode()
        for index in range(batch)
    ]
    body = runs[0] if path.endswith(("/runs", "/run")) else b'{"runs":[' + b",".join(runs) + b"]}"
    accept = b"application/x-ndjson" if stream else b"application/json"
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nAccept: %b\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), accept, len(body), body)
    )


class Connection(asyncio.Protocol):
    """One keep-alive connection; ``done`` gets itself, status, answer and time of each answer."""

    def __init__(self, done: "Callable[[Connection, int, bytes, float], None]") -> None:
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self._size = 0
        self._whole = -1  # bytes of the whole answer, once known; 0: chunked
        self._transport: asyncio.Transport | None = None
        self.number = 0
        self.sent = 0.0
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its type

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def send(self, request: bytes, number: int) -> None:
        """Send one request; only after the answer to the one before."""
        assert self._transport is not None
        self.number = number
        self.sent = self._loop.time()
        self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._whole < 0:
            text = b"".join(self._chunks)
            head, separator, _ = text.partition(b"\r\n\r\n")
            if not separator:
                return
            _, found, length = head.lower().partition(b"content-length:")
            length = length.partition(b"\r\n")[0]
            self._whole = len(head) + 4 + int(length) if found else 0
        if self._size >= self._whole > 0 or (self._whole == 0 and data.endswith(_END[2:])):
            text = b"".join(self._chunks)
            self._chunks.clear()
            self._size, self._whole = 0, -1
            self._done(self, int(text[9:12]), text, self._loop.time())


class Driver:
    """Keeps every connection busy until enough requests were sent, and waits for all answers."""

    def __init__(self, *, uds: str, template: bytes, batch: int, has_ids: bool = True) -> None:
        self._uds = uds
        self._template = template
        self._batch = batch
        self._has_ids = has_ids
        self._next = 0
        self._left = 0
        self._until = float("inf")
        self._end: asyncio.Future[None] | None = None
        self._outstanding = 0
        self._connections: list[Connection] = []
        self._idle: list[Connection] | None = None  # open loop: connections without a request
        self.tally = Tally()

    async def open(self, connections: int) -> None:
        """Connect; nothing is sent yet."""
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            _, one = await loop.create_unix_connection(
                lambda: Connection(self._answered), self._uds
            )
            self._connections.append(one)

    def close(self) -> None:
        """Close all connections."""
        for one in self._connections:
            one.close()

    async def run(self, *, requests: int, first_number: int, within_s: float) -> Tally:
        """Send ``requests`` requests, each connection the next as soon as it is answered.

        Raises:
            TimeoutError: not all were answered in time.
        """
        self.tally = Tally()
        self._next, self._left = first_number, requests
        self._end = asyncio.get_running_loop().create_future()
        for one in self._connections:
            self._send(one)
        async with asyncio.timeout(within_s):
            await self._end
        return self.tally

    async def pace(
        self, *, requests: int, per_s: float, first_number: int, within_s: float
    ) -> Tally:
        """Send ``requests`` requests at a fixed rate, whether earlier ones are answered or not.

        Latency counts from the moment at which a request should have been sent.

        Raises:
            TimeoutError: not all were answered in time.
        """
        loop = asyncio.get_running_loop()
        self.tally = Tally()
        self._next, self._left = first_number, 0
        self._end = loop.create_future()
        self._idle = list(self._connections)
        started = loop.time()
        async with asyncio.timeout(within_s):
            for index in range(requests):
                due = started + index / per_s
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not self._idle:
                    await self.open(1)
                    self._idle.append(self._connections[-1])
                one = self._idle.pop()
                self._left = 1
                self._send(one)
                one.sent = due
            self._idle = None
            if self._outstanding:
                await self._end
        return self.tally

    def _send(self, one: Connection) -> None:
        if self._idle is not None and self._left <= 0:
            self._idle.append(one)
            return
        if self._left <= 0:
            if not self._outstanding and self._end and not self._end.done():
                self._end.set_result(None)
            return
        self._left -= 1
        self._outstanding += 1
        number = self._next
        self._next += 1
        one.send(self._template.replace(_NUMBER, b"%08d" % number), number)

    def _answered(self, one: Connection, status: int, text: bytes, now: float) -> None:
        self._outstanding -= 1
        tally = self.tally
        if status != 200:
            tally.refused[status] = tally.refused.get(status, 0) + 1
            tally.refusals_s.append(now - one.sent)
        elif self._is_complete(one.number, text):
            tally.runs += self._batch
            tally.latencies_s.append(now - one.sent)
        else:
            tally.wrong += 1
        self._send(one)

    def _is_complete(self, number: int, text: bytes) -> bool:
        if text.count(_OK) != self._batch:
            return False
        if not self._has_ids:
            return True
        found = _ID.findall(text)
        prefix = b"b-%08d-" % number
        return len(set(found)) == self._batch and all(one.startswith(prefix) for one in found)
