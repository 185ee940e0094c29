"""Results on their way to the queue: while one batch travels, the next one gathers.

A result that comes alone leaves at once. Under load at most one batch leaves each two
milliseconds: a message costs the worker and the server as much as the results of three runs.
"""

import asyncio
import logging
import time

from rollyard_queue.base import Queue, QueueError
from rollyard_queue.records import FinishedRun

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_BACK_OFF_S = 0.5
_GATHER_S = 0.002
_MESSAGE_BYTES = 8 * 1024 * 1024
_MAX_WAITING_BYTES = 64 * 1024 * 1024


class Outbox:
    """Sends what is put in, in batches, until closed; run() is its one task."""

    def __init__(self, queue: Queue, worker_id: str) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self._waiting: list[FinishedRun] = []
        self._changed = asyncio.Event()
        self._closed = False
        self.given_up = 0
        """Results that the queue did not take in time."""

    def __len__(self) -> int:
        """Results that wait."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """True while results wait for a slow queue: take no new work then."""
        return sum(len(finished.result) for finished in self._waiting) > _MAX_WAITING_BYTES

    def put(self, finished: FinishedRun) -> None:
        """Send this result soon."""
        self._waiting.append(finished)
        self._changed.set()

    def close(self) -> None:
        """Let run() return when everything has been sent."""
        self._closed = True
        self._changed.set()

    async def run(self) -> None:
        """Send until closed and empty."""
        while not self._closed or self._waiting:
            if self._waiting:
                await self._send(self._next_batch())
                if not self._closed:
                    await asyncio.sleep(_GATHER_S)
            else:
                self._changed.clear()
                await self._changed.wait()

    def _next_batch(self) -> list[FinishedRun]:
        """All that waits, or as much as one message should carry, and at least one."""
        size = 0
        for count, finished in enumerate(self._waiting):
            size += len(finished.result)
            if count and size > _MESSAGE_BYTES:
                break
        else:
            count = len(self._waiting)
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _send(self, batch: list[FinishedRun]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                await self._queue.finish(self._worker_id, batch)
                return
            except QueueError as error:
                if time.monotonic() > deadline:
                    # Their leases end and others run them again; nothing is lost, only late.
                    self.given_up += len(batch)
                    log.error("finish.given_up", extra={"runs": len(batch), "reason": str(error)})
                    return
                await asyncio.sleep(_BACK_OFF_S)
