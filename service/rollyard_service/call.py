"""What one HTTP request waits for, and what has come back of it."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from rollyard_queue.records import QueuedRun
from rollyard_service.intake import AcceptedRun


class Call:
    """The runs of one request. Each gets exactly one result; later ones are ignored.

    One coroutine may wait in changed() at a time. ``gone`` and ``stopping`` end the wait early:
    the caller went away, or this process is about to stop.
    """

    def __init__(self, runs: Iterable[AcceptedRun], *, now: float, streamed: bool = False) -> None:
        self.pending: dict[str, QueuedRun] = {}
        self.patience: defaultdict[float, list[str]] = defaultdict(list)
        """Seconds to wait at most, and for which runs (usually one entry)."""
        self.payload_bytes = 0
        for queued, patience_s in runs:
            self.payload_bytes += len(queued.payload)
            self.pending[queued.run_id] = queued
            self.patience[patience_s].append(queued.run_id)
        self.run_ids = tuple(self.pending)
        self.created = self.asked = now
        self.gone = self.stopping = False
        self._streamed = streamed
        self._results: dict[str, bytes] = {}
        self._wake: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """True when no run is outstanding."""
        return not self.pending

    def deliver(self, run_id: str, result: bytes) -> None:
        """Take a result, unless the run has one."""
        if self.pending.pop(run_id, None) is not None:
            self._results[run_id] = result
            if self._streamed or not self.pending:
                self._notify()

    def hang_up(self) -> None:
        """Note that the caller went away."""
        self.gone = True
        self._notify()

    def stop(self) -> None:
        """Note that this process will stop before the runs end."""
        self.stopping = True
        self._notify()

    async def changed(self) -> None:
        """Wait until all results are there (streamed: until one is), or the wait is pointless."""
        if self.done or self.gone or self.stopping or (self._streamed and self._results):
            return
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def take(self) -> list[bytes]:
        """Hand over what came since the last take, in order of arrival."""
        results = list(self._results.values())
        self._results.clear()
        return results

    def in_order(self) -> list[bytes]:
        """All results, in the order of the request.

        Raises:
            KeyError: a run is outstanding, or its result was taken.
        """
        return [self._results[run_id] for run_id in self.run_ids]

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
