"""Many runs given at once: kept flowing through the windows, and told apart by their place."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Final

from rollyard._call import Call
from rollyard._link import Link
from rollyard.errors import DeadlineExceeded, Overloaded, RollyardError, TransportError, Unavailable
from rollyard.types import RunRequest, RunResult

Progress = Callable[[int, int], None]
"""Called with the number of finished runs and of all runs, after each run that finishes."""

# What the service owes us. The rest (malformed, unauthorized, too large) is the caller's to mend.
SERVICE_FAULTS: Final = (TransportError, Overloaded, Unavailable)

Finished = tuple[int, RunResult]


class BatchStream:
    """The runs of one ``run_batch``; at most ``window`` of them are under way at once."""

    def __init__(
        self, link: Link, requests: Sequence[RunRequest], *, window: int, refill: int
    ) -> None:
        self._link = link
        self._todo: Iterator[tuple[int, RunRequest]] = iter(enumerate(requests))
        self._total = len(requests)
        self._window = window
        self._refill = refill
        self._active: dict[int, Call] = {}
        self._ended: deque[int] = deque()
        self._wake = asyncio.Event()

    async def finished(
        self, *, deadline: float | None, progress: Progress | None
    ) -> AsyncGenerator[Finished, None]:
        """Yield place and result of each run as it finishes.

        A run to which the service gave no answer comes as ``infra_error``, after the first real
        answer; if there is none at all, its error is raised at the end.

        Raises:
            RollyardError: as above; or the service refused a run for the caller's fault; or the
                loop time ``deadline`` passed.
        """
        held: list[tuple[int, RunResult, RollyardError]] = []
        answered = False
        done = 0
        try:
            self._submit()
            while self._active:
                await self._some_ended(deadline)
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
                if len(self._active) <= self._window - self._refill:
                    self._submit()
            if held:
                raise held[0][2]
        finally:
            for call in self._active.values():
                call.future.cancel()
            self._link.abandon(self._active.values())

    def _submit(self) -> None:
        while len(self._active) < self._window:
            entry = next(self._todo, None)
            if entry is None:
                return
            place, request = entry
            call = Call(request)
            self._active[place] = call
            call.future.add_done_callback(lambda _, place=place: self._end(place))
            self._link.coalescer.submit(call)

    def _end(self, place: int) -> None:
        self._ended.append(place)
        self._wake.set()

    async def _some_ended(self, deadline: float | None) -> None:
        self._wake.clear()  # all that ended was taken, with nothing awaited since
        if deadline is None:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._wake.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{len(self._active)} runs of the batch have no result at its deadline"
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
