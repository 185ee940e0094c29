"""A discrete-event simulation of a whole service: from a caller's request to its answer.

    client → gateway → shard's queue → worker's claim → start gate → cores → worker → shard
           → gateway → client

What a run costs in each part is measured (``costs``); how parts take turns is what their code
does: workers claim as ``rollyard_sandbox.worker`` (room, prefetch, one claim at a time, results in
batches), and runs start as ``rollyard_sandbox.gate`` lets them (two for each core, a place taken
back after 25 ms from what does not compute, after half a second from all). Cores are shared
as Linux does (``simulation_events.Cores``). The same seed gives the same result, to the last digit.

Left out: making slots, memory, the network, retries and refusals. A program that is stopped at its
time limit is one that computes as long as its limit, or until three times the limit has passed.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

from rollyard_loadtest.simulation_events import Calendar, Cores, Process

PLACES_PER_CORE, HOLD_S, MAX_HOLDS = 2, 0.025, 20
"""Of rollyard_sandbox.gate; a test holds them against it."""
PREFETCH_PER_CORE = 8
"""Of rollyard_sandbox.worker."""
SLOTS_PER_CORE = 16
STOPPED_AFTER = 3
"""Of rollyard_sandbox.clock: waiting for a core is left out of a time limit, up to twice it."""


class Distribution(Protocol):
    """Something to draw seconds from."""

    @property
    def mean_s(self) -> float: ...
    def draw_s(self, chance: random.Random) -> float: ...


@dataclass(frozen=True)
class Measured:
    """What was measured, each value as likely as the others."""

    values_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        return sum(self.values_s) / len(self.values_s)

    def draw_s(self, chance: random.Random) -> float:
        return chance.choice(self.values_s)


@dataclass(frozen=True)
class Exponential:
    """Memoryless; for comparison with formulas."""

    mean_s: float

    def draw_s(self, chance: random.Random) -> float:
        return chance.expovariate(1 / self.mean_s)


@dataclass(frozen=True, kw_only=True)
class RunClass:
    """One kind of programs. ``cpu``: core seconds of slot and program; ``sleep``: then asleep."""

    name: str
    share: float
    cpu: Distribution
    sleep: Distribution = Measured((0.0,))
    stopped: bool = False
    """Stopped at its limit, whose length is the caller's choice: not part of ``latency``."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and what a run costs them, in core seconds a run; half of it before the program
    and half after, and of a shard a third each for submit, claim and finish."""

    workers: int = 1
    cores: int = 2
    """Of each worker."""
    slots: int | None = None
    """Of each worker; None: 16 for each core."""
    gateways: int = 1
    shards: int = 1
    gateway_s: float = 0.0
    shard_s: float = 0.0
    worker_s: float = 0.0
    client_s: float = 0.0
    """Zero: clients are somebody else's machine."""
    hop_s: float = 0.0
    """From one part to the next."""
    one_machine: bool = False
    """Everything shares the worker's cores; else each gateway and shard has a core of its own."""
    background: float = 0.0
    """Other groups of processes that always compute on each worker's machine."""
    places_per_core: float = PLACES_PER_CORE
    hold_s: float = HOLD_S
    max_holds: float = MAX_HOLDS
    prefetch_per_core: int = PREFETCH_PER_CORE


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """``poisson`` at ``rate_per_s``, ``closed`` with ``runs`` in flight, or a ``burst`` of
    ``runs`` at once. Runs count that arrive from ``warmup_s`` until ``until_s``."""

    kind: Literal["poisson", "closed", "burst"]
    runs: int = 0
    rate_per_s: float = 0.0
    until_s: float = 60.0
    warmup_s: float = 0.0


@dataclass
class Simulated:
    """What came of it. Latencies in seconds, in the order of the answers."""

    latencies_s: list[float] = field(default_factory=list[float])
    """Of all runs that count."""
    finished_s: list[float] = field(default_factory=list[float])
    """Of those that end by themselves."""
    arrived: int = 0
    answered: int = 0
    answered_in_window: int = 0
    window_s: float = 0.0
    mean_in_system: float = 0.0
    """Time average over the window."""
    utilisation: float = 0.0
    """Of the workers' cores, over the whole simulation."""
    end_s: float = 0.0

    @property
    def runs_per_s(self) -> float:
        return self.answered_in_window / self.window_s if self.window_s else 0.0


def quantile(values: list[float], q: float) -> float:
    """The value at or below which a share ``q`` lies; 0 for none."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


class _Run:
    __slots__ = ("arrived_s", "kind", "left_gate", "shard")

    def __init__(self, kind: RunClass, arrived_s: float, shard: "_Shard") -> None:
        self.kind = kind
        self.arrived_s = arrived_s
        self.shard = shard
        self.left_gate = False


class _Shard:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.queue: deque[_Run] = deque()


class _Worker:
    """As rollyard_sandbox.worker takes runs, starts and reports them."""

    def __init__(
        self, simulation: "Simulation", cores: Cores, own: Process, shards: list[_Shard]
    ) -> None:
        cluster = simulation.cluster
        self._simulation = simulation
        self._cores = cores
        self._process = own
        self._shards = shards
        self._slots = cluster.slots or SLOTS_PER_CORE * cluster.cores
        self._prefetch = cluster.prefetch_per_core * cluster.cores
        self._free_places = cluster.places_per_core * cluster.cores
        self._at_gate: deque[_Run] = deque()
        self._running = 0
        self._claiming = False
        self._reporting = False
        self._outbox: list[_Run] = []
        self._idle = True

    def wake(self) -> None:
        """There is work; it was taken off the list of idle workers."""
        self._idle = False
        self.look()

    def _room(self) -> int:
        if len(self._at_gate) > self._prefetch // 2:
            return 0
        return min(self._slots - self._running, self._prefetch - len(self._at_gate))

    def look(self) -> None:
        """Claim if there is work and room; one claim at a time."""
        if self._claiming or self._room() <= 0:
            return
        shard = max(self._shards, key=lambda one: len(one.queue))
        count = min(self._room(), len(shard.queue))
        if not count:
            if not self._idle:
                self._idle = True
                self._simulation.idle.append(self)
            return
        self._claiming = True
        runs = [shard.queue.popleft() for _ in range(count)]
        self._running += count
        cluster = self._simulation.cluster

        def claimed() -> None:
            self._claiming = False
            for run in runs:
                self._process.do(cluster.worker_s / 2, lambda run=run: self._enter(run))
            self.look()

        self._simulation.via(shard.process, cluster.shard_s / 3 * count, claimed)

    def _enter(self, run: _Run) -> None:
        if self._free_places >= 1 and not self._at_gate:
            self._start(run)
        else:
            self._at_gate.append(run)

    def _start(self, run: _Run) -> None:
        self._free_places -= 1
        computes = True
        holds = 1
        cluster, calendar = self._simulation.cluster, self._simulation.calendar

        def look() -> None:
            nonlocal holds
            if run.left_gate:
                return
            if holds >= cluster.max_holds or not computes:
                self._leave(run)
                return
            holds += 1
            calendar.after(cluster.hold_s, look)

        def computed() -> None:
            nonlocal computes
            computes = False
            sleep_s = run.kind.sleep.draw_s(self._simulation.chance)
            if sleep_s > 0:
                calendar.after(sleep_s, lambda: self._ended(run))
            else:
                self._ended(run)

        if cluster.hold_s < float("inf"):
            calendar.after(cluster.hold_s, look)
        demand_s = run.kind.cpu.draw_s(self._simulation.chance)
        at_most_s = demand_s * STOPPED_AFTER if run.kind.stopped else float("inf")
        self._cores.program(demand_s, computed, at_most_s=at_most_s)

    def _leave(self, run: _Run) -> None:
        if not run.left_gate:
            run.left_gate = True
            self._free_places += 1
            while self._at_gate and self._free_places >= 1:
                self._start(self._at_gate.popleft())
            self.look()

    def _ended(self, run: _Run) -> None:
        self._leave(run)
        self._running -= 1
        self._process.do(self._simulation.cluster.worker_s / 2, lambda: self._put(run))
        self.look()

    def _put(self, run: _Run) -> None:
        self._outbox.append(run)
        self._report()

    def _report(self) -> None:
        if self._reporting or not self._outbox:
            return
        self._reporting = True
        batch, self._outbox = self._outbox, []
        left = len(batch)

        def recorded(run: _Run) -> None:
            nonlocal left
            left -= 1
            self._simulation.finished(run)
            if not left:
                self._reporting = False
                self._report()

        for run in batch:
            cost_s = self._simulation.cluster.shard_s / 3
            self._simulation.via(run.shard.process, cost_s, lambda run=run: recorded(run))


class Simulation:
    """One simulated service under one load. Use once: ``Simulation(…).run()``."""

    def __init__(
        self, cluster: Cluster, classes: list[RunClass], arrivals: Arrivals, *, seed: str = "1"
    ) -> None:
        """Raises ValueError when there is nothing to draw programs from."""
        if not classes:
            raise ValueError("there must be at least one class of runs")
        self.cluster = cluster
        self.calendar = Calendar()
        self.chance = random.Random(f"simulation-{seed}")  # noqa: S311 - not for secrets
        self._classes = classes
        self._bounds = list(accumulate(one.share for one in classes))
        self._arrivals = arrivals
        self._result = Simulated()
        self._in_system, self._area, self._since_s = 0, 0.0, 0.0
        self._worker_cores: list[Cores] = []
        self.idle: deque[_Worker] = deque()
        """Workers with room that found nothing to do; the longest idle is woken first."""
        self._build()
        self.idle.extend(self._workers)

    def _build(self) -> None:
        cluster = self.cluster
        machines = [
            Cores(self.calendar, cluster.cores, background=cluster.background)
            for _ in range(cluster.workers)
        ]
        self._worker_cores = machines

        def process(index: int) -> Process:
            if cluster.one_machine:
                return Process(machines[index % len(machines)])
            return Process(Cores(self.calendar, 1))

        self._client = process(0)
        self._gateways = [process(n) for n in range(cluster.gateways)]
        self._shards = [_Shard(process(n)) for n in range(cluster.shards)]
        self._workers = [
            _Worker(self, machine, Process(machine), self._shards) for machine in machines
        ]

    def run(self) -> Simulated:
        """Simulate until every run that arrived has been answered."""
        load = self._arrivals
        match load.kind:
            case "poisson":
                self._arrive_at_random()
            case "closed" | "burst":
                for _ in range(load.runs):
                    self.calendar.after(0.0, self._arrive)
        self.calendar.run(until_s=float("inf"))
        result = self._result
        result.end_s = self.calendar.now_s
        until_s = result.end_s if load.kind == "burst" else load.until_s
        result.window_s = until_s - load.warmup_s
        if result.window_s > 0:
            result.mean_in_system = self._area / result.window_s
        busy_s = sum(cores.busy_s for cores in self._worker_cores)
        result.utilisation = busy_s / max(
            1e-12, result.end_s * self.cluster.cores * self.cluster.workers
        )
        return result

    # From the caller to the queue ---------------------------------------------------------------

    def _arrive_at_random(self) -> None:
        gap_s = self.chance.expovariate(self._arrivals.rate_per_s)
        if self.calendar.now_s + gap_s < self._arrivals.until_s:

            def arrive() -> None:
                self._arrive()
                self._arrive_at_random()

            self.calendar.after(gap_s, arrive)

    def _arrive(self) -> None:
        [kind] = self.chance.choices(self._classes, cum_weights=self._bounds)
        number = self._result.arrived
        self._result.arrived += 1
        run = _Run(kind, self.calendar.now_s, self._shards[number % len(self._shards)])
        self._count(+1)
        cluster = self.cluster
        gateway = self._gateways[number % len(self._gateways)]

        def at_gateway() -> None:
            self.via(gateway, cluster.gateway_s / 2, at_shard)

        def at_shard() -> None:
            self.via(run.shard.process, cluster.shard_s / 3, queued)

        def queued() -> None:
            run.shard.queue.append(run)
            if self.idle:
                self.idle.popleft().wake()

        self._client.do(cluster.client_s / 2, at_gateway)

    def via(self, process: Process, cost_s: float, done: Callable[[], None]) -> None:
        """Go to another process, be served there, and do ``done``."""
        if self.cluster.hop_s > 0:
            self.calendar.after(self.cluster.hop_s, lambda: process.do(cost_s, done))
        else:
            process.do(cost_s, done)

    # Back to the caller -------------------------------------------------------------------------

    def finished(self, run: _Run) -> None:
        """The queue has its result."""
        cluster = self.cluster
        gateway = self._gateways[self._result.answered % len(self._gateways)]

        def at_client() -> None:
            self._client.do(cluster.client_s / 2, lambda: self._answer(run))

        self.via(gateway, cluster.gateway_s / 2, at_client)

    def _answer(self, run: _Run) -> None:
        load, now_s = self._arrivals, self.calendar.now_s
        self._count(-1)
        self._result.answered += 1
        in_window = load.kind == "burst" or load.warmup_s <= now_s < load.until_s
        self._result.answered_in_window += in_window
        # A closed loop's runs count when they were sent within the window, as the bench's do.
        if load.kind == "burst" or load.warmup_s <= run.arrived_s < load.until_s:
            self._result.latencies_s.append(now_s - run.arrived_s)
            if not run.kind.stopped:
                self._result.finished_s.append(now_s - run.arrived_s)
        if load.kind == "closed" and now_s < load.until_s:
            self._arrive()

    def _count(self, change: int) -> None:
        load, now_s = self._arrivals, self.calendar.now_s
        until_s = float("inf") if load.kind == "burst" else load.until_s
        from_s = max(self._since_s, load.warmup_s)
        self._area += self._in_system * max(0.0, min(now_s, until_s) - from_s)
        self._since_s = now_s
        self._in_system += change
