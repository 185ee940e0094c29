"""What this process knows of the queue's load: a fraction of a second old, and free to ask.

Guarantees: one look at the queue for all requests of a while, often under load and seldom without;
an estimate of how fast the queue drains, from times in which it had work; and the reason, in the
queue's words, while it does not answer.
"""

import asyncio
import logging
import math

from rollyard_queue.base import Queue, QueueError
from rollyard_queue.records import QueueStats

BUSY_LOOK_S = 0.1
"""Between two looks while requests come: a look costs the server some 20 µs."""
IDLE_LOOK_S = 1.0
ANSWER_S = 2.0
"""A look that takes longer counts as an outage."""
RATE_S = 3.0
"""Time constant of the drain rate."""
TRUST_S = 0.5
"""Seconds of work that must have been seen before the rate says anything."""
RETRY_S = (0.1, 30.0)
"""Least and most that a refused caller is told to wait."""
UNKNOWN_RETRY_S = 1.0
SURE_S, UNSURE_RETRY_S = 3.0, 2.0
"""Until this much work was seen, the rate may be that of a start: nobody is told to wait longer."""
FAILURE_S = 5.0
"""Seconds for which a refused submit says that the queue takes nothing, unless one succeeds."""

logger = logging.getLogger(__name__)


class Load:
    """A cached view. All methods belong to one event loop."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._stats: QueueStats | None = None
        self._looked_at = -math.inf
        self._submitted = 0  # by this process, since the last look
        self._submitted_bytes = 0
        self._asked = asyncio.Event()
        self._rate = 0.0  # runs a second
        self._seen_s = 0.0
        self._silence = ""
        self._failure, self._failed_at = "", -math.inf
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def silence(self) -> str:
        """Why the queue does not answer; empty while it does, as far as is known."""
        return self._silence

    @property
    def outage(self) -> str:
        """Why the queue takes no runs; empty while it does, as far as is known."""
        if self._silence:
            return self._silence
        age_s = asyncio.get_running_loop().time() - self._failed_at
        return self._failure if age_s < FAILURE_S else ""

    @property
    def rate(self) -> float:
        """Runs a second that the queue drains while it has work; 0: not known yet."""
        return self._rate if self._seen_s >= TRUST_S else 0.0

    def queued(self) -> tuple[float, float]:
        """Runs and bytes that wait now, as far as can be told. A caller here is looked for soon."""
        self._asked.set()
        if self._stats is None:
            return 0.0, 0.0
        age_s = asyncio.get_running_loop().time() - self._looked_at
        drained = min(self.rate * age_s, self._stats.queued + self._submitted)
        runs = self._stats.queued + self._submitted - drained
        size = self._stats.queued_bytes + self._submitted_bytes
        share = runs / max(1, self._stats.queued + self._submitted)
        return runs, size * share

    def is_light(self, runs: int, size_bytes: int) -> bool:
        """True when, with certainty, fewer runs and bytes wait than these; quicker to ask."""
        self._asked.set()
        stats = self._stats
        return not self._silence and (
            stats is None
            or (
                stats.queued + self._submitted < runs
                and stats.queued_bytes + self._submitted_bytes < size_bytes
            )
        )

    def submitted(self, runs: int, size_bytes: int) -> None:
        """Note what this process has put into the queue."""
        self._submitted += runs
        self._submitted_bytes += size_bytes
        self.answered()

    def answered(self) -> None:
        """Note that the queue took what it was sent."""
        self._silence = ""
        self._failed_at = -math.inf

    def failed(self, reason: str) -> None:
        """Note that the queue refused or lost a submit."""
        self._failure, self._failed_at = reason, asyncio.get_running_loop().time()

    def retry_after_s(self, excess: float) -> float:
        """Seconds until ``excess`` runs have drained."""
        if not self.rate:
            return UNKNOWN_RETRY_S
        longest_s = RETRY_S[1] if self._seen_s >= SURE_S else UNSURE_RETRY_S
        return min(longest_s, max(RETRY_S[0], excess / self.rate))

    async def _keep_looking(self) -> None:
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    stats = await self._queue.stats()
                self._silence = ""
                self._take(stats)
            except TimeoutError:
                self._silence = f"the queue did not answer within {ANSWER_S:g} s"
            except QueueError as error:
                self._silence = str(error)
            except Exception:
                logger.exception("load.look_failed")
            await self._pause()

    async def _pause(self) -> None:
        self._asked.clear()
        await asyncio.sleep(BUSY_LOOK_S)
        if self._silence:
            return
        try:
            async with asyncio.timeout(IDLE_LOOK_S - BUSY_LOOK_S):
                await self._asked.wait()
        except TimeoutError:
            pass

    def _take(self, stats: QueueStats) -> None:
        now = asyncio.get_running_loop().time()
        before, elapsed_s = self._stats, now - self._looked_at
        self._stats, self._looked_at = stats, now
        self._submitted = self._submitted_bytes = 0
        if before is None or not before.queued or not stats.queued:
            return  # workers that wait for work say nothing of how fast they are
        drained = stats.finished_total - before.finished_total
        if drained < 0:
            return  # another server, or one that started anew
        weight = 1 - math.exp(-min(elapsed_s, IDLE_LOOK_S) / RATE_S)
        if not self._seen_s:
            weight = 1.0
        self._rate += weight * (drained / elapsed_s - self._rate)
        self._seen_s += elapsed_s
