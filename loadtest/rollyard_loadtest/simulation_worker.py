"""One worker of the simulation, as rollyard_sandbox.worker and its gate take turns."""

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rollyard_loadtest.simulation_events import Calendar, Cores, Process
from rollyard_loadtest.simulation_model import (
    FIRST_LOOK_S,
    SLOTS_PER_CORE,
    STOPPED_AFTER,
    Cluster,
    RunClass,
)


class Around(Protocol):
    """What a worker sees of the rest of the simulation."""

    cluster: Cluster
    calendar: Calendar
    chance: random.Random
    idle: "deque[Worker]"

    def via(self, process: Process, cost_s: float, done: Callable[[], None]) -> None: ...
    def finished(self, run: "Run") -> None: ...


class Run:
    """One run on its way."""

    __slots__ = ("arrived_s", "kind", "left_gate", "shard")

    def __init__(self, kind: RunClass, arrived_s: float, shard: "Shard") -> None:
        self.kind = kind
        self.arrived_s = arrived_s
        self.shard = shard
        self.left_gate = False


class Shard:
    """One part of the queue, and the thread that serves it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.queue: deque[Run] = deque()


class Worker:
    """As rollyard_sandbox.worker takes runs, starts and reports them."""

    def __init__(self, simulation: Around, cores: Cores, own: Process, shards: list[Shard]) -> None:
        cluster = simulation.cluster
        self._simulation = simulation
        self._cores = cores
        self._process = own
        self._shards = shards
        self._slots = cluster.slots or SLOTS_PER_CORE * cluster.cores
        self._prefetch = cluster.prefetch_per_core * cluster.cores
        self._free_places = cluster.places_per_core * cluster.cores
        self._at_gate: deque[Run] = deque()
        self._running = 0
        self._claiming = False
        self._reporting = False
        self._outbox: list[Run] = []
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

    def _enter(self, run: Run) -> None:
        if self._free_places >= 1 and not self._at_gate:
            self._start(run)
        else:
            self._at_gate.append(run)

    def _start(self, run: Run) -> None:
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
            calendar.after(min(FIRST_LOOK_S, cluster.hold_s), look)
        demand_s = run.kind.cpu.draw_s(self._simulation.chance)
        at_most_s = demand_s * STOPPED_AFTER if run.kind.stopped else float("inf")
        self._cores.program(demand_s, computed, at_most_s=at_most_s)

    def _leave(self, run: Run) -> None:
        if not run.left_gate:
            run.left_gate = True
            self._free_places += 1
            while self._at_gate and self._free_places >= 1:
                self._start(self._at_gate.popleft())
            self.look()

    def _ended(self, run: Run) -> None:
        self._leave(run)
        self._running -= 1
        self._process.do(self._simulation.cluster.worker_s / 2, lambda: self._put(run))
        self.look()

    def _put(self, run: Run) -> None:
        self._outbox.append(run)
        self._report()

    def _report(self) -> None:
        if self._reporting or not self._outbox:
            return
        self._reporting = True
        batch, self._outbox = self._outbox, []
        left = len(batch)

        def recorded(run: Run) -> None:
            nonlocal left
            left -= 1
            self._simulation.finished(run)
            if not left:
                self._reporting = False
                self._report()

        for run in batch:
            cost_s = self._simulation.cluster.shard_s / 3
            self._simulation.via(run.shard.process, cost_s, lambda run=run: recorded(run))
