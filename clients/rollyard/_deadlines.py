"""Time-outs of calls: one timer for all of them.

A timer for each would be a handle in the loop's heap for each call that ended long before it.
"""

import asyncio
import heapq
from collections.abc import Callable, Generator
from itertools import count

from rollyard._call import Call
from rollyard._pacer import STRIDE, Pacer

PURGE_CALLS = 1024


class Deadlines:
    """Tells which calls have no answer when their time is over. Belongs to one event loop."""

    def __init__(self, pacer: Pacer, on_late: Callable[[Call, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pacer = pacer
        self._on_late = on_late
        self._heap: list[tuple[float, int, float, Call]] = []
        self._number = count()
        self._timer: asyncio.TimerHandle | None = None
        self._purge_at = PURGE_CALLS

    def __len__(self) -> int:
        """Calls whose time is kept, some of which have ended."""
        return len(self._heap)

    def add(self, call: Call, timeout_s: float) -> None:
        """Have ``on_late(call, timeout_s)`` called then, unless the call has ended."""
        if len(self._heap) >= self._purge_at:
            self._heap = [entry for entry in self._heap if not entry[3].future.done()]
            heapq.heapify(self._heap)
            self._purge_at = max(PURGE_CALLS, 2 * len(self._heap))
        when = self._loop.time() + timeout_s
        heapq.heappush(self._heap, (when, next(self._number), timeout_s, call))
        if self._timer is None or when < self._timer.when():
            self._set_timer(when)

    def stop(self) -> None:
        """Forget all."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._pacer.start(self._end_late())

    def _end_late(self) -> Generator[None, None, None]:
        ended = 0
        while self._heap:
            when, _, timeout_s, call = self._heap[0]
            if call.future.done():
                heapq.heappop(self._heap)
                continue
            if when > self._loop.time():
                break
            heapq.heappop(self._heap)
            self._on_late(call, timeout_s)
            ended += 1
            if not ended % STRIDE:
                yield
        if self._heap and self._timer is None:
            self._set_timer(self._heap[0][0])
