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


class _Pool:
    """Jobs that advance at one and the same rate.

    A clock that advances at that rate makes each event cost a logarithm: a job ends when the clock
    has moved by its demand (the virtual time of processor sharing; Kleinrock, Queueing Systems II,
    4.4).
    """

    def __init__(self) -> None:
        self.jobs: list[tuple[float, int, Action]] = []
        self.rate = 0.0
        self._clock_s = 0.0
        self._numbers = count()

    def add(self, demand_s: float, done: Action) -> tuple[float, int, Action]:
        job = (self._clock_s + demand_s, next(self._numbers), done)
        heapq.heappush(self.jobs, job)
        return job

    def drop(self, job: tuple[float, int, Action]) -> None:
        self.jobs.remove(job)
        heapq.heapify(self.jobs)

    def pass_s(self, seconds: float) -> None:
        self._clock_s += seconds * self.rate

    def next_end_s(self) -> float:
        """Seconds until the first job ends, at the present rate."""
        if not self.jobs or self.rate <= 0:
            return float("inf")
        return max(0.0, self.jobs[0][0] - self._clock_s) / self.rate

    def end_first(self) -> Action:
        end_s, _, done = heapq.heappop(self.jobs)
        self._clock_s = max(self._clock_s, end_s)  # what rounding left
        return done


class Cores:
    """``count`` cores, shared out as Linux does between groups of processes.

    Each process of ours is a group (a session is one where autogroups are on), all programs
    together are one (the worker's control group), which weighs as much as a process on each core
    (rollyard_sandbox.cgroups), and each of ``background`` other groups always has something to
    compute. Groups get shares by weight, none more than it can use: a process and a background
    group one core, the programs one each. Programs share theirs evenly.
    (max-min fairness; Bertsekas and Gallager, Data Networks, 6.5.2)
    """

    def __init__(self, calendar: Calendar, count_: int, *, background: float = 0.0) -> None:
        self._calendar = calendar
        self._count = count_
        self._background = background
        self._processes, self._programs = _Pool(), _Pool()
        self._since_s = 0.0
        self._version = 0
        self.busy_s = 0.0
        """Core seconds used by processes and programs."""

    def process(self, demand_s: float, done: Action) -> None:
        """Let one of our processes compute for ``demand_s`` core seconds, then do ``done``."""
        self._add(self._processes, demand_s, done)

    def program(self, demand_s: float, done: Action, *, at_most_s: float = float("inf")) -> None:
        """As :meth:`process`, for a program in a slot; stopped ``at_most_s`` from now."""
        left = True

        def ended() -> None:
            nonlocal left
            left = False
            done()

        job = self._add(self._programs, demand_s, ended)

        def stop() -> None:
            if left:
                self._advance()
                self._programs.drop(job)
                self._plan()
                ended()

        if at_most_s < float("inf"):
            self._calendar.after(at_most_s, stop)

    def _add(self, pool: _Pool, demand_s: float, done: Action) -> tuple[float, int, Action]:
        self._advance()
        job = pool.add(demand_s, done)
        self._plan()
        return job

    def _advance(self) -> None:
        passed_s = self._calendar.now_s - self._since_s
        self._since_s = self._calendar.now_s
        for pool in (self._processes, self._programs):
            self.busy_s += passed_s * pool.rate * len(pool.jobs)
            pool.pass_s(passed_s)

    def _plan(self) -> None:
        own, programs = len(self._processes.jobs), len(self._programs.jobs)
        others = own + self._background
        usable, share = min(programs, self._count), self._count / (others + self._count)
        theirs = max(self._count - others, min(usable, share * self._count))
        if programs:
            self._programs.rate = min(1.0, theirs / programs)
        left = self._count - min(usable, theirs)
        self._processes.rate = min(1.0, left / max(others, 1e-9))
        self._version += 1
        first = min((self._processes, self._programs), key=_Pool.next_end_s)
        end_s = first.next_end_s()
        if end_s < float("inf"):
            version = self._version
            self._calendar.after(end_s, lambda: self._finish(version, first))

    def _finish(self, version: int, pool: _Pool) -> None:
        if version != self._version:
            return  # a job came or went meanwhile, and the plan was made anew
        self._advance()
        done = pool.end_first()
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
            self._cores.process(cost_s, ended)
        else:
            ended()
