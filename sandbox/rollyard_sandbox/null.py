"""A worker that runs nothing, so that a benchmark measures gateway and queue alone.

Only ``--null-for-benchmarks`` starts it, no setting and no variable of the environment does. It
claims runs as a worker would and answers each ``ok`` after a fixed service time, with a result of
the shape and size of a real one that says what it is: ``template`` is ``null``, ``degraded`` names
``nothing-was-run``, and so does ``message``.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from rollyard_queue.base import Queue, QueueError
from rollyard_queue.records import Delivery, FinishedRun
from rollyard_sandbox.outbox import Outbox
from rollyard_sandbox.presence import Presence

DEFAULT_SLOTS = 1024
"""Runs held at once: one claim's worth, since nothing is done with them."""

_WAIT_S = 1.0
_BACK_OFF_S = 0.5
_MAX_CLAIM = 1024

log = logging.getLogger(__name__)


class NullWorker:
    """Drains one queue without running anything.

    Capacity is known: ``slots / service_s`` runs a second where ``service_s`` is above 0.
    """

    def __init__(
        self, queue: Queue, *, worker_id: str, slots: int, service_s: float, lease_s: float
    ) -> None:
        self._queue = queue
        self._id = worker_id
        self._slots = slots
        self._service_s = service_s
        self._lease_s = lease_s
        self._held: deque[tuple[float, list[Delivery]]] = deque()  # by the time they end
        self._busy = 0
        self._outbox = Outbox(queue, worker_id)
        self._presence = Presence(queue, worker_id, slots=slots, lease_s=lease_s)
        self._stopping = asyncio.Event()
        # Everything of a result that is the same for all runs, built once.
        self._result = (
            b'{"run_id":"%%b","outcome":"ok","exit_code":0,"stdout":"","wall_ms":%(wall).3f,'
            b'"cpu_ms":0.0,"peak_memory_bytes":0,"queued_ms":%%.3f,"attempt":%%d,'
            b'"worker_id":"%(worker)b","template":"null","degraded":["nothing-was-run"],'
            b'"message":"answered by a null worker, for benchmarks only: nothing was run"}'
            % {b"wall": service_s * 1e3, b"worker": worker_id.encode()}
        )

    def stop(self) -> None:
        """Claim no more; run() returns once what is held has been answered."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until stop()."""
        log.warning("worker.null", extra={"worker_id": self._id, "note": "runs nothing"})
        async with self._presence.kept(self._outbox, renew=self._renew):
            while not self._stopping.is_set() or self._busy:
                try:
                    await self._serve_once()
                except QueueError as error:
                    log.warning("queue.unavailable", extra={"reason": str(error)})
                    await asyncio.sleep(_BACK_OFF_S)

    async def _serve_once(self) -> None:
        self._answer_ended()
        room = 0 if self._stopping.is_set() else self._slots - self._busy
        claimed: Sequence[Delivery] = ()
        if room > 0 and not self._outbox.full:
            claimed = await self._queue.claim(
                self._id, max_runs=min(room, _MAX_CLAIM), lease_s=self._lease_s
            )
        if claimed:
            self._busy += len(claimed)
            self._held.append((time.monotonic() + self._service_s, list(claimed)))
        elif room > 0:
            await self._queue.wait(self._id, for_work=True, wait_s=self._pause_s())
        else:
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        """Seconds until something held ends; at most a second."""
        if not self._held:
            return _WAIT_S
        return min(_WAIT_S, max(0.001, self._held[0][0] - time.monotonic()))

    def _answer_ended(self) -> None:
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            _, deliveries = self._held.popleft()
            self._busy -= len(deliveries)
            for one in deliveries:
                text = self._result % (one.run_id.encode(), one.queued_ms, one.attempt)
                self._outbox.put(FinishedRun(one.run_id, one.attempt, text))

    async def _renew(self) -> None:
        held = [one.run_id for _, deliveries in self._held for one in deliveries]
        if held:
            await self._queue.renew(self._id, held, lease_s=self._lease_s)
