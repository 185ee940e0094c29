"""A worker's place in its queue: it says that it lives, renews its leases, sends its results."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from rollyard_queue.base import Queue, QueueError
from rollyard_sandbox.outbox import Outbox

log = logging.getLogger(__name__)

ANNOUNCE_TTL_S = 8.0
"""A worker that was not heard of for so long is gone."""
_ANNOUNCE_S = 2.0


class Presence:
    """What every worker does beside its work; a failing queue is logged, and tried again."""

    def __init__(self, queue: Queue, worker_id: str, *, slots: int, lease_s: float) -> None:
        self._queue = queue
        self._id = worker_id
        self._slots = slots
        self._lease_s = lease_s

    async def announce(self) -> None:
        """Say once that the worker lives.

        Raises:
            QueueError: the queue's server does not answer.
        """
        await self._queue.announce(self._id, slots=self._slots, ttl_s=ANNOUNCE_TTL_S)

    @contextlib.asynccontextmanager
    async def kept(
        self,
        outbox: Outbox,
        *,
        renew: Callable[[], Awaitable[None]],
        failed: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[None]:
        """Keep it up while the block lasts; then retire, and send what the outbox holds.

        Args:
            outbox: sent from here.
            renew: renews the leases of what the worker holds; called thrice in a lease's time.
            failed: told of each beat that the queue did not take.
        """
        beats = [
            asyncio.create_task(self._every(period_s, beat, failed))
            for period_s, beat in (
                (_ANNOUNCE_S, self.announce),
                (self._lease_s / 3, renew),
                (self._lease_s / 2, self._queue.reap),
            )
        ]
        sending = asyncio.create_task(outbox.run())
        try:
            yield
        finally:
            for beat in beats:
                beat.cancel()
            await asyncio.gather(*beats, return_exceptions=True)
            with contextlib.suppress(QueueError):
                await self._queue.retire(self._id)
            outbox.close()
            await sending

    async def _every(
        self, period_s: float, beat: Callable[[], Awaitable[object]], failed: Callable[[], None]
    ) -> None:
        while True:
            try:
                await beat()
            except QueueError as error:
                failed()
                log.warning("heartbeat.failed", extra={"reason": str(error)})
            await asyncio.sleep(period_s)
