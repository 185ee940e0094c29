"""One batch on its way through HTTP, until each of its runs has a result or an error."""

import asyncio
import copy
import logging
from collections.abc import Iterable
from contextlib import aclosing

from pydantic import ValidationError

from rollyard._call import Call
from rollyard._lines import LineSplitter
from rollyard._refusal import Refusal, read_refusal
from rollyard._retry import RetryPolicy, TransportFault, final_error, is_retried, retry_after_s
from rollyard._transport import Transport
from rollyard.errors import RollyardError, TransportError
from rollyard.types import RunResult

NDJSON = "application/x-ndjson"
_BLAMES_MEMBERS = frozenset({400, 413, 422})

logger = logging.getLogger(__name__)


class Exchange:
    """Carries calls with distinct ids; each future is done when the task ends, whatever happens."""

    def __init__(self, transport: Transport, policy: RetryPolicy, calls: Iterable[Call]) -> None:
        self._transport = transport
        self._policy = policy
        self._calls = {call.run_id: call for call in calls}
        self.size = len(self._calls)
        for call in self._calls.values():
            call.exchange = self
        self.task = asyncio.get_running_loop().create_task(self._run())
        # Also when it is cancelled before its first step: no caller may wait for ever.
        self.task.add_done_callback(self._ended)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        _fail(self._calls.values(), TransportError("the client was closed"))

    def waits_for(self, run_id: str) -> bool:
        """True while somebody waits for that run here."""
        call = self._calls.get(run_id)
        return call is not None and not call.future.done()

    @property
    def live(self) -> bool:
        """True while somebody waits for any of the runs."""
        return any(not call.future.done() for call in self._calls.values())

    async def _run(self) -> None:
        try:
            await self._carry(dict(self._calls))
        except Exception as error:  # a bug of ours or of the HTTP library
            logger.exception("exchange failed")
            _fail(self._calls.values(), TransportError(f"{type(error).__name__}: {error}"))

    async def _carry(self, waiting: dict[str, Call]) -> None:
        """Send, and send again what got no answer, until nothing waits."""
        retry = 0
        while waiting:
            sent = list(waiting.values())
            refused = await self._try_once(waiting)
            _drop_done(waiting)
            if not waiting:
                return
            if isinstance(refused, Refusal) and refused.status in _BLAMES_MEMBERS:
                await self._part(sent, refused)
                return
            error = refused.error() if isinstance(refused, Refusal) else refused
            if any(call.answered for call in sent):
                retry = 0  # a stream that gets on is no outage
            if retry >= self._policy.max_retries or not is_retried(error):
                _fail(waiting.values(), final_error(error, tries=retry + 1))
                return
            await asyncio.sleep(self._policy.delay_s(retry, retry_after_s(error)))
            retry += 1
            _drop_done(waiting)

    async def _try_once(self, waiting: dict[str, Call]) -> Refusal | TransportFault:
        """One request. Answers go straight to the callers; returns why the others have none."""
        calls = waiting.values()
        body = b'{"runs":[' + b",".join(call.payload_now() for call in calls) + b"]}"
        silence_s = max(call.silence_s for call in calls)
        try:
            async with self._transport.request(
                "POST", "/v1/batches", body, accept=NDJSON, read_timeout_s=silence_s
            ) as answer:
                if answer.status != 200:
                    return await read_refusal(answer)
                splitter = LineSplitter()
                # Read to the very end, also after the last result: a connection is only used
                # again when its answer was read out.
                async with aclosing(answer.chunks()) as chunks:
                    async for chunk in chunks:
                        for line in splitter.feed(chunk):
                            _deliver(line, waiting)
        except TransportFault as fault:
            return fault
        return TransportFault("POST /v1/batches: the answer ended before all results had come")

    async def _part(self, calls: list[Call], refusal: Refusal) -> None:
        """Find the runs for which the batch was refused, so that no neighbour suffers."""
        if len(calls) == 1:
            _fail(calls, refusal.error(0))
            return
        guilty = {place for place in refusal.problems if place < len(calls)}
        if guilty and len(guilty) == len(refusal.problems):
            for place in guilty:
                _fail([calls[place]], refusal.error(place))
            await self._carry(_by_id(call for i, call in enumerate(calls) if i not in guilty))
            return
        half = len(calls) // 2
        await asyncio.gather(self._carry(_by_id(calls[:half])), self._carry(_by_id(calls[half:])))


def _by_id(calls: Iterable[Call]) -> dict[str, Call]:
    return {call.run_id: call for call in calls}


def _drop_done(waiting: dict[str, Call]) -> None:
    # Answered, or its caller went away.
    for run_id in [run_id for run_id, call in waiting.items() if call.future.done()]:
        del waiting[run_id]


def _deliver(line: bytes, waiting: dict[str, Call]) -> None:
    try:
        result = RunResult.model_validate_json(line)
    except ValidationError as error:
        raise TransportFault("POST /v1/batches: a line of the answer is no result") from error
    call = waiting.get(result.run_id)
    if call is not None and not call.future.done():
        call.future.set_result(result)


def _fail(calls: Iterable[Call], error: RollyardError) -> None:
    for call in calls:
        if not call.future.done():
            own = copy.copy(error)  # each caller raises its own: tracebacks grow where raised
            own.__dict__["run_id"] = call.run_id
            call.future.set_exception(own)
