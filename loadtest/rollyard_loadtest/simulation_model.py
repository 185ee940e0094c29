"""What a simulation is told, and what it answers."""

import random
from dataclasses import dataclass, field
from typing import Literal, Protocol

PLACES_PER_CORE, FIRST_LOOK_S, HOLD_S, MAX_HOLDS = 2, 0.005, 0.025, 20
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
    trace: tuple[tuple[float, RunClass], ...] = ()
    """Runs that really came, in order: at how many seconds, and what. ``poisson`` takes both, the
    others what they were; after the last, runs are drawn."""


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
