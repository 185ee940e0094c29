"""Results on their way to the queue: while one batch travels, the next one gathers.

A result that comes alone leaves at once. Under load at most one batch leaves each two
milliseconds: a message costs the worker and the server as much as the results of three runs.

Each part of the queue has a lane of its own, so that results for a part that is away wait, and keep
no others.
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
        self._part_of = queue.part_of
        self._lanes = [_Lane(queue, worker_id) for _ in range(queue.parts)]

    def __len__(self) -> int:
        """Results that wait."""
        return sum(len(lane.waiting) for lane in self._lanes)

    @property
    def given_up(self) -> int:
        """Results that the queue did not take in time."""
        return sum(lane.given_up for lane in self._lanes)

    @property
    def full(self) -> bool:
        """True while results wait for a slow queue: take no new work then."""
        size = sum(len(finished.result) for lane in self._lanes for finished in lane.waiting)
        return size > _MAX_WAITING_BYTES

    def put(self, finished: FinishedRun) -> None:
        """Send this result soon."""
        self._lanes[self._part_of(finished.run_id)].put(finished)

    def close(self) -> None:
        """Let run() return when everything has been sent."""
        for lane in self._lanes:
            lane.close()

    async def run(self) -> None:
        """Send until closed and empty."""
        async with asyncio.TaskGroup() as lanes:
            for lane in self._lanes:
                lanes.create_task(lane.run())


class _Lane:
    """The results for one part of the queue."""

    def __init__(self, queue: Queue, worker_id: str) -> None:
        self._queue = queue
        self._worker_id = worker_id
        self.waiting: list[FinishedRun] = []
        self._changed = asyncio.Event()
        self._closed = False
        self.given_up = 0

    def put(self, finished: FinishedRun) -> None:
        self.waiting.append(finished)
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def run(self) -> None:
        while not self._closed or self.waiting:
            if self.waiting:
                await self._send(self._next_batch())
                if not self._closed:
                    await asyncio.sleep(_GATHER_S)
            else:
                self._changed.clear()
                await self._changed.wait()

    def _next_batch(self) -> list[FinishedRun]:
        """All that waits, or as much as one message should carry, and at least one."""
        size = 0
        for count, finished in enumerate(self.waiting):
            size += len(finished.result)
            if count and size > _MESSAGE_BYTES:
                break
        else:
            count = len(self.waiting)
        batch, self.waiting = self.waiting[:count], self.waiting[count:]
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
