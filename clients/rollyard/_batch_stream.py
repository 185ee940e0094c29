"""Many runs given at once: kept flowing through the windows, and told apart by their place."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from rollyard._call import Call
from rollyard._coalesce import FILL_RUNS
from rollyard._link import Link
from rollyard.errors import DeadlineExceeded, Overloaded, RollyardError, TransportError, Unavailable
from rollyard.types import RunRequest, RunResult

SUBMITTED_AT_ONCE = 1024  # of a large batch, in one turn of the loop

Progress = Callable[[int, int], None]
"""Called with the number of finished runs and of all runs, after each run that finishes."""

# What the service owes us. The rest (malformed, unauthorized, too large) is the caller's to mend.
SERVICE_FAULTS: Final = (TransportError, Overloaded, Unavailable)

Finished = tuple[int, RunResult]


class BatchStream:
    """The runs of one ``run_batch``; at most the coalescer's share is under way at once."""

    def __init__(
        self,
        link: Link,
        requests: Sequence[str | RunRequest],
        *,
        job: str,
        deadline: float | None,
    ) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._todo: Iterator[tuple[int, str | RunRequest]] = iter(enumerate(requests))
        self._unsent = self._total = len(requests)
        self._job = job
        self._deadline = deadline
        self._active: dict[int, Call] = {}
        self._ended: deque[int] = deque()
        self._wake = asyncio.Event()

    async def finished(self, *, progress: Progress | None) -> AsyncGenerator[Finished, None]:
        """Yield place and result of each run as it finishes.

        A run to which the service gave no answer comes as ``infra_error``, after the first real
        answer; if there is none at all, its error is raised at the end.

        Raises:
            RollyardError: as above; or the service refused a run for the caller's fault; or the
                deadline passed.
        """
        held: list[tuple[int, RunResult, RollyardError]] = []
        answered = False
        done = 0
        try:
            self._submit()
            while self._active:
                await self._some_ended()
                while self._ended:
                    place = self._ended.popleft()
                    result, error = _settle(self._active.pop(place))
                    done += 1
                    if progress is not None:
                        progress(done, self._total)
                    if error is not None and not answered:
                        held.append((place, result, error))
                        continue
                    answered = True
                    for held_place, held_result, _ in held:
                        yield held_place, held_result
                    held.clear()
                    yield place, result
                self._submit()
            if held:
                raise held[0][2]
        finally:
            for call in self._active.values():
                call.future.cancel()
            self._link.abandonment.add(self._active.values())

    def _submit(self) -> None:
        """Send more if there is room; the rest in later turns of the loop."""
        room = self._link.coalescer.share - len(self._active)
        if not self._unsent or room < min(FILL_RUNS, self._unsent):
            return
        for place, asked in islice(self._todo, min(room, SUBMITTED_AT_ONCE)):
            request = asked if isinstance(asked, RunRequest) else None
            call = Call(
                asked,
                self._loop,
                job=self._job,
                run_id=request.run_id if request is not None else None,
                bounded=self._deadline is not None,
            )
            self._active[place] = call
            call.future.add_done_callback(lambda _, place=place: self._end(place))
            self._link.coalescer.submit(call)
            self._unsent -= 1
        if self._unsent and room > SUBMITTED_AT_ONCE:
            self._loop.call_soon(self._wake.set)

    def _end(self, place: int) -> None:
        self._ended.append(place)
        self._wake.set()

    async def _some_ended(self) -> None:
        self._wake.clear()  # all that ended was taken, with nothing awaited since
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._wake.wait()
        except TimeoutError:
            trouble = self._link.coalescer.trouble
            raise DeadlineExceeded(
                f"{len(self._active) + self._unsent} runs of the batch have no result at its "
                f"deadline{f' ({trouble})' if trouble else ''}"
            ) from None


def _settle(call: Call) -> tuple[RunResult, RollyardError | None]:
    try:
        return call.future.result(), None
    except SERVICE_FAULTS as error:
        message = f"{type(error).__name__}: {error}"
        return RunResult(run_id=call.run_id, outcome="infra_error", message=message), error


async def in_order(finished: AsyncGenerator[Finished, None]) -> AsyncGenerator[Finished, None]:
    """Hold results back until all before them have come."""
    waiting: dict[int, RunResult] = {}
    following = 0
    try:
        async for place, result in finished:
            waiting[place] = result
            while following in waiting:
                yield following, waiting.pop(following)
                following += 1
    finally:
        await finished.aclose()
