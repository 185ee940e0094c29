"""The machinery of the simulation: a calendar of events, shared cores, one-threaded processes."""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

type Action = Callable[[], None]


class Calendar:
    """Events in order of time; those of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def after(self, delay_s: float, action: Action) -> None:
        """Do this ``delay_s`` seconds from now."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, *, until_s: float) -> None:
        """Go on until nothing is left to do, or the time has come."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class Cores:
    """``count`` cores that share themselves out evenly (processor sharing).

    Each job runs on one core at most, so ``n`` jobs advance at ``min(1, count / n)``. A clock that
    advances at that rate makes each event cost a logarithm: a job ends when the clock has moved by
    its demand (Kleinrock, Queueing Systems II, 4.4; the virtual time of fair queueing).
    """

    def __init__(self, calendar: Calendar, count_: int) -> None:
        self._calendar = calendar
        self._count = count_
        self._jobs: list[tuple[float, int, Action]] = []
        self._numbers = count()
        self._virtual_s = 0.0
        self._since_s = 0.0
        self._version = 0
        self.busy_s = 0.0
        """Core seconds used."""

    def add(self, demand_s: float, done: Action) -> None:
        """Compute for ``demand_s`` core seconds, then do ``done``."""
        self._advance()
        entry = (self._virtual_s + demand_s, next(self._numbers), done)
        heapq.heappush(self._jobs, entry)
        self._plan()

    def _rate(self) -> float:
        return min(1.0, self._count / len(self._jobs)) if self._jobs else 0.0

    def _advance(self) -> None:
        passed_s = self._calendar.now_s - self._since_s
        self._since_s = self._calendar.now_s
        self.busy_s += passed_s * min(self._count, len(self._jobs))
        self._virtual_s += passed_s * self._rate()

    def _plan(self) -> None:
        self._version += 1
        if not self._jobs:
            return
        version = self._version
        left_s = max(0.0, self._jobs[0][0] - self._virtual_s)
        self._calendar.after(left_s / self._rate(), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # a job came or went meanwhile, and the plan was made anew
        self._advance()
        end_s, _, done = heapq.heappop(self._jobs)
        self._virtual_s = max(self._virtual_s, end_s)  # what rounding left
        self._plan()
        done()


class Process:
    """One thread: one thing after the other, on cores that it shares with others."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._waiting: deque[tuple[float, Action]] = deque()
        self._busy = False

    def do(self, cost_s: float, done: Action) -> None:
        """Spend ``cost_s`` core seconds after everything asked for before, then do ``done``."""
        self._waiting.append((cost_s, done))
        if not self._busy:
            self._busy = True
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            self._busy = False
            return
        cost_s, done = self._waiting.popleft()

        def ended() -> None:
            done()
            self._next()

        if cost_s > 0:
            self._cores.add(cost_s, ended)
        else:
            ended()
