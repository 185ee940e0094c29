"""Tells the queue which runs this process no longer waits for, many in one round trip."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from rollyard_queue.base import Queue, QueueUnavailable

BATCH = 1024
FLUSH_S = 2.0
"""Seconds that flush() gives an unresponsive queue; leases end forgotten runs later."""
MAX_REMEMBERED = 200_000
"""Ids kept through an outage; beyond it the runs just run for nobody."""


class Abandonment:
    """A set of run ids on their way to ``queue.cancel(…, abandon_by=reply_to)``.

    An id that is wanted again by the time it would be sent is left alone. A submit of an id whose
    cancellation is under way must wait for settled(), else the two could arrive in either order.
    """

    def __init__(self, queue: Queue, *, reply_to: str, is_wanted: Callable[[str], bool]) -> None:
        self._queue = queue
        self._reply_to = reply_to
        self._is_wanted = is_wanted
        self._ids: dict[str, None] = {}
        self._added = asyncio.Event()
        self._in_flight: set[str] = set()
        self._landed = asyncio.Event()

    def add(self, run_id: str) -> None:
        """Have a run abandoned soon."""
        if len(self._ids) < MAX_REMEMBERED:
            self._ids[run_id] = None
            self._added.set()

    async def settled(self, run_ids: Iterable[str]) -> None:
        """Return once none of these is in a cancellation under way."""
        while self._in_flight and not self._in_flight.isdisjoint(run_ids):
            await self._landed.wait()

    async def step(self) -> None:
        """Wait for ids and send them; on failure they stay.

        Raises:
            QueueUnavailable: nothing is known of those that were under way.
        """
        await self._added.wait()
        self._added.clear()
        await self._send()

    async def flush(self) -> None:
        """Send what is there, as far as the queue answers in time; never beside step()."""
        with contextlib.suppress(QueueUnavailable, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._send()

    async def _send(self) -> None:
        while self._ids:
            batch = [run_id for run_id in list(self._ids)[:BATCH] if self._forget(run_id)]
            if not batch:
                continue
            self._in_flight.update(batch)
            self._landed.clear()
            try:
                await self._queue.cancel(batch, abandon_by=self._reply_to)
            except BaseException:
                for run_id in batch:
                    self.add(run_id)
                raise
            finally:
                self._in_flight.difference_update(batch)
                self._landed.set()

    def _forget(self, run_id: str) -> bool:
        del self._ids[run_id]
        return not self._is_wanted(run_id)
