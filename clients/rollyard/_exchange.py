"""One batch on its way through HTTP: one request, and the lines that come back."""

import asyncio
import copy
import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from pydantic import ValidationError

from rollyard._call import Call
from rollyard._gateway import Gateway
from rollyard._lines import LineSplitter
from rollyard._pacer import STRIDE, Pacer, Work
from rollyard._refusal import Refusal, read_refusal
from rollyard._retry import TransportFault
from rollyard.errors import RollyardError, TransportError
from rollyard.types import RunResult

NDJSON = "application/x-ndjson"

logger = logging.getLogger(__name__)


class Host(Protocol):
    """Who sends exchanges, and hears from them."""

    def admitted(self, exchange: "Exchange") -> None:
        """Its batch was taken: results will come."""
        ...

    def answered(self, exchange: "Exchange", runs: int) -> None:
        """So many results came."""
        ...

    def ended(self, exchange: "Exchange", why: Refusal | TransportFault | None) -> None:
        """It is over. ``why`` tells why some runs have no result; None: they got an error."""
        ...


class Exchange:
    """Carries encoded calls with distinct ids, once."""

    def __init__(
        self, gateway: Gateway, calls: Sequence[Call], *, host: Host, pacer: Pacer, now: float
    ) -> None:
        self.gateway = gateway
        self.calls = calls
        self.sent_at = now
        self.outstanding = len(calls)
        """Runs of it that count as in flight."""
        self.got_on = False
        """Some result came."""
        self._waiting = {call.run_id: call for call in calls}
        self._host = host
        self._pacer = pacer
        for call in calls:
            call.exchange = self
            call.sent = True
        self._body = b'{"runs":[' + b",".join([call.payload_at(now) for call in calls]) + b"]}"
        self._silence_s = max([call.silence_s for call in calls])
        self.task = asyncio.get_running_loop().create_task(self._run())
        # Also when it is cancelled before its first step: no caller may wait for ever.
        self.task.add_done_callback(self._ended)

    @property
    def live(self) -> bool:
        """True while somebody waits for any of the runs."""
        return any(not call.future.done() for call in self._waiting.values())

    def _ended(self, task: "asyncio.Task[Refusal | TransportFault | None]") -> None:
        why = None
        if task.cancelled():
            fail(self.calls, TransportError("the client was closed"))
        elif (error := task.exception()) is not None:  # a bug of ours or of the HTTP library
            logger.error("exchange failed", exc_info=error)
            fail(self.calls, TransportError(f"{type(error).__name__}: {error}"))
        else:
            why = task.result()
        for call in self.calls:
            if call.exchange is self:
                call.exchange = None
        self._host.ended(self, why)

    async def _run(self) -> Refusal | TransportFault | None:
        """Answers go straight to the callers; returns why the others have none."""
        body, self._body = self._body, b""
        try:
            async with self.gateway.transport.request(
                "POST", "/v1/batches", body, accept=NDJSON, read_timeout_s=self._silence_s
            ) as answer:
                del body
                if answer.status != 200:
                    return await read_refusal(answer)
                self._host.admitted(self)
                splitter = LineSplitter()
                # Read to the very end, also after the last result: a connection is only used
                # again when its answer was read out.
                async with aclosing(answer.chunks()) as chunks:
                    async for chunk in chunks:
                        if lines := splitter.feed(chunk):
                            await self._pacer.finish(self._deliver(lines))
        except TransportFault as fault:
            return fault
        return TransportFault("POST /v1/batches: the answer ended before all results had come")

    def _deliver(self, lines: Sequence[bytes]) -> Work:
        for start in range(0, len(lines), STRIDE):
            part = lines[start : start + STRIDE]
            came = 0
            try:
                for line in part:
                    came += self._deliver_one(line)
            finally:
                if came:
                    self.got_on = True
                    self._host.answered(self, came)
            yield

    def _deliver_one(self, line: bytes) -> int:
        try:
            result = RunResult.model_validate_json(line)
        except ValidationError as error:
            raise TransportFault("POST /v1/batches: a line of the answer is no result") from error
        call = self._waiting.pop(result.run_id, None)
        if call is None:
            return 0
        if not call.future.done():
            call.future.set_result(result)
        return 1


def fail(calls: Iterable[Call], error: RollyardError) -> None:
    """Give an error to all who still wait."""
    for call in calls:
        if not call.future.done():
            own = copy.copy(error)  # each caller raises its own: tracebacks grow where raised
            own.__dict__["run_id"] = call.run_id
            call.future.set_exception(own)
