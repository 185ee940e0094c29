"""How many gateways, shards, worker cores and how much memory a wish takes. See docs/capacity.md.

A wish is ``in_flight`` rollouts whose calls are answered within ``p99_s``: all calling at once
(a training step's burst), or each again ``think_s`` after its answer (a steady stream). Formulas
give the first guess, simulation the answer.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any, Literal

from rollyard_loadtest.costs import Costs, KindCost
from rollyard_loadtest.plan_model import HOPS, classes_of, squared_variation, wait_quantile_s
from rollyard_loadtest.simulation import Simulation
from rollyard_loadtest.simulation_model import (
    SLOTS_PER_CORE,
    Arrivals,
    Cluster,
    Simulated,
    quantile,
)

Q = 0.99
MOST_BUSY = 0.85
"""Of the worker cores in a steady stream: beyond it the wait grows without bounds."""
PROCESS_BUSY = 0.5
"""Of a gateway's, a shard's or a worker's one thread: what is measured in small is not the whole
truth, and a full thread delays everybody."""
MOST_CORES = 64
SHARD_BATCH = 8
"""Runs in a claim or a report: what a worker prefetches for one core."""
SHARD_BASE_BYTES = 8 << 20
RESULTS_S = 60.0
"""Results stay in the queue's server so long, for who asks again."""
SIMULATED_RUNS = 4000
_CURVE = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
_MOST_DOUBLINGS = 12


class ImpossibleWish(ValueError):
    """No number of cores fulfils it; the message says why, and what would be possible."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for. ``of``: runs that the percentile is about; ``finished`` leaves out those
    that are stopped at their own time limit."""

    in_flight: int
    p99_s: float
    think_s: float | None = None
    batch: int = 64
    """Runs that travel in one request."""
    cores_per_worker: int | None = None
    of: Literal["finished", "all"] = "finished"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer. Times in seconds, sizes in bytes."""

    wish: Wish
    scenario: str
    gateways: int
    shards: int
    workers: int
    cores_per_worker: int
    slots_per_worker: int
    memory_bytes: dict[str, float]
    """Of all gateways, all shards, all workers."""
    rate_per_s: float
    """Runs a second: the stream's, or the burst's over the time that it may take."""
    cpu_ms: float
    """Core milliseconds of a worker's machine a run."""
    floor_s: float
    """99th percentile without any waiting."""
    formula_p99_s: float
    p50_s: float
    p99_s: float
    """Simulated."""
    utilisation: float
    curve: list[tuple[int, float]]
    """Worker cores and the 99th percentile that they would give."""
    notes: list[str] = field(default_factory=list[str])

    @property
    def worker_cores(self) -> int:
        return self.workers * self.cores_per_worker

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "worker_cores": self.worker_cores}


class Planner:
    """Plans for one machine's costs."""

    def __init__(
        self, costs: Costs, *, seed: str = "1", say: Callable[[str], None],
        simulated_runs: int = SIMULATED_RUNS,
    ) -> None:  # fmt: skip
        """``simulated_runs``: in each simulation; fewer are faster and rougher."""
        self._simulated_runs = simulated_runs
        self._costs = costs
        self._seed = seed
        self._say = say

    def plan(self, wish: Wish) -> Plan:
        """Raises ImpossibleWish when no number of cores would do."""
        floor_s = self.floor_s(wish)
        if floor_s >= wish.p99_s:
            raise ImpossibleWish(self._why_impossible(wish, floor_s))
        base = self._base(wish)
        guess = self._guess(wish, base, floor_s)
        workers = self._search(wish, base, guess)
        cluster = replace(base, workers=workers)
        done = self._simulate(wish, cluster)
        latencies = done.latencies_s if wish.of == "all" else done.finished_s
        return Plan(
            wish=wish,
            scenario=self._costs.scenario,
            gateways=cluster.gateways,
            shards=cluster.shards,
            workers=workers,
            cores_per_worker=cluster.cores,
            slots_per_worker=SLOTS_PER_CORE * cluster.cores,
            memory_bytes=self._memory(wish, cluster),
            rate_per_s=self._rate(wish),
            cpu_ms=self._costs.cpu_ms + self._costs.mixed.worker_ms,
            floor_s=floor_s,
            formula_p99_s=self._formula_s(wish, cluster, floor_s),
            p50_s=quantile(latencies, 0.5),
            p99_s=quantile(latencies, Q),
            utilisation=done.utilisation,
            curve=self._curve(wish, cluster),
            notes=self._notes(wish),
        )

    # What cannot be had --------------------------------------------------------------------------

    def floor_s(self, wish: Wish) -> float:
        """The percentile on an idle machine with a core for each run: the programs' own time."""
        own = [
            (cpu_ms + mean(kind.sleep_ms), kind.share / len(kind.cpu_ms))
            for kind in self._kinds(wish)
            for cpu_ms in self._costs.crowded_ms(kind)
        ]
        whole, passed = sum(share for _, share in own), 0.0
        for own_ms, share in sorted(own):
            passed += share
            if passed >= Q * whole - 1e-12:
                return (own_ms + self._fixed_ms()) / 1e3
        raise AssertionError("there is at least one kind")

    def _fixed_ms(self) -> float:
        batched = self._costs.batched
        return self._costs.latency_ms + batched.gateway_ms + batched.valkey_ms

    def _kinds(self, wish: Wish) -> list[KindCost]:
        kinds = [k for k in self._costs.kinds if wish.of == "all" or not k.stopped]
        if not kinds:
            raise ImpossibleWish(
                "every program of this mix is stopped at its time limit, so none has a latency of"
                " its own; ask for --of all"
            )
        return kinds

    def _why_impossible(self, wish: Wish, floor_s: float) -> str:
        slowest = max(self._kinds(wish), key=lambda kind: max(kind.cpu_ms) + mean(kind.sleep_ms))
        longest_s = (max(slowest.cpu_ms) + mean(slowest.sleep_ms)) / 1e3
        hint = ""
        if slowest.stopped:
            hint = "; --of finished leaves out runs that are stopped at their own time limit"
        return (
            f"a p99 of {wish.p99_s:g} s cannot be had with any number of cores: without any waiting"
            f" 99% of the runs take up to {floor_s:.3g} s (the slowest kind, {slowest.name!r},"
            f" up to {longest_s:.3g} s). Ask for more than that{hint}"
        )

    # First guess ---------------------------------------------------------------------------------

    def _rate(self, wish: Wish) -> float:
        if wish.think_s is None:
            return wish.in_flight / wish.p99_s
        return wish.in_flight / max(wish.think_s, 1e-3)

    def _base(self, wish: Wish) -> Cluster:
        """A cluster with everything but its number of workers."""
        costs, rate = self._costs, self._rate(wish)
        single, batched = costs.single, costs.batched

        def spread(one_ms: float, many_ms: float, batch: int) -> float:
            """Seconds a run: what a request costs, shared by its runs, and what each adds."""
            return (max(0.0, one_ms - many_ms) / batch + many_ms) / 1e3

        gateway_s = spread(single.gateway_ms, batched.gateway_ms, wish.batch)
        shard_s = spread(single.valkey_ms, batched.valkey_ms, min(wish.batch, SHARD_BATCH))
        return Cluster(
            cores=wish.cores_per_worker or self.most_cores(),
            gateways=max(1, math.ceil(rate * gateway_s / PROCESS_BUSY)),
            shards=max(1, math.ceil(rate * shard_s / PROCESS_BUSY)),
            gateway_s=gateway_s,
            shard_s=shard_s,
            worker_s=costs.mixed.worker_ms / 1e3,
            hop_s=costs.latency_ms / 1e3 / HOPS,
        )

    def most_cores(self) -> int:
        """Cores that one worker process can keep busy: it spends some time of its own on each run,
        on one thread."""
        ratio = self._costs.cpu_ms / max(1e-6, self._costs.mixed.worker_ms)
        return max(1, min(MOST_CORES, math.floor(ratio * PROCESS_BUSY)))

    def _guess(self, wish: Wish, base: Cluster, floor_s: float) -> int:
        """Workers, by formula."""
        for workers in _growing():
            cluster = replace(base, workers=workers)
            if self._formula_s(wish, cluster, floor_s) <= wish.p99_s:
                return workers
        raise ImpossibleWish("no number of workers that this planner knows would do")

    def _formula_s(self, wish: Wish, cluster: Cluster, floor_s: float) -> float:
        """Burst: floor and drain. Stream: floor and wait (Allen-Cunneen)."""
        cores = cluster.workers * cluster.cores
        worker_ms = self._costs.mixed.worker_ms
        if wish.think_s is None:
            # Of a run that is stopped later only what it computes until then is in the way.
            until_ms = wish.p99_s * 1e3
            work_ms = sum(
                kind.share * mean(min(value, until_ms) for value in self._costs.crowded_ms(kind))
                for kind in self._costs.kinds
            )
            return floor_s + Q * wish.in_flight * (work_ms + worker_ms) / 1e3 / cores
        service_s = (self._costs.cpu_ms + worker_ms) / 1e3
        if self._rate(wish) * service_s > MOST_BUSY * cores:
            return math.inf
        c2 = squared_variation(self._costs)
        return floor_s + wait_quantile_s(cores, self._rate(wish), service_s, c2, Q)

    # Simulation ----------------------------------------------------------------------------------

    def _search(self, wish: Wish, base: Cluster, guess: int) -> int:
        """The fewest workers whose simulated percentile is what was wished for."""
        low, high = 0, guess
        for _ in range(_MOST_DOUBLINGS):
            if self._fulfils(wish, replace(base, workers=high)):
                break
            low, high = high, high * 2
        else:
            raise ImpossibleWish(
                f"even {high} workers of {base.cores} cores do not bring the p99 to"
                f" {wish.p99_s:g} s; what remains is not the cores"
            )
        while high - low > max(1, high // 50):
            middle = (low + high) // 2
            if self._fulfils(wish, replace(base, workers=middle)):
                high = middle
            else:
                low = middle
        return high

    def _fulfils(self, wish: Wish, cluster: Cluster) -> bool:
        self._say(f"simulating {cluster.workers * cluster.cores} cores")
        if wish.think_s is not None:
            busy = self._rate(wish) * (self._costs.cpu_ms + self._costs.mixed.worker_ms) / 1e3
            if busy > MOST_BUSY * cluster.workers * cluster.cores:
                return False
        return self._p99_s(wish, cluster) <= wish.p99_s

    def _p99_s(self, wish: Wish, cluster: Cluster) -> float:
        done = self._simulate(wish, cluster)
        return quantile(done.latencies_s if wish.of == "all" else done.finished_s, Q)

    def _simulate(self, wish: Wish, cluster: Cluster) -> Simulated:
        """A part of the cluster with its part of the load: large clusters are many alike."""
        part = min(1.0, self._simulated_runs / max(1, wish.in_flight))
        workers = max(1, round(cluster.workers * part))
        part = workers / cluster.workers
        small = replace(
            cluster,
            workers=workers,
            gateways=1,
            shards=1,
            # One stands for all, so much faster that it is as busy as each of them.
            gateway_s=cluster.gateway_s / cluster.gateways / part,
            shard_s=cluster.shard_s / cluster.shards / part,
        )
        if wish.think_s is None:
            runs = max(1, round(wish.in_flight * part))
            arrivals = Arrivals(kind="burst", runs=runs)
        else:
            rate = self._rate(wish) * part
            until_s = 1.5 * self._simulated_runs / rate
            arrivals = Arrivals(
                kind="poisson", rate_per_s=rate, until_s=until_s, warmup_s=until_s / 3
            )
        return Simulation(small, classes_of(self._costs), arrivals, seed=self._seed).run()

    def _curve(self, wish: Wish, cluster: Cluster) -> list[tuple[int, float]]:
        counts = sorted({max(1, round(cluster.workers * factor)) for factor in _CURVE})
        self._say("p99 for fewer and more cores")
        return [
            (count * cluster.cores, self._p99_s(wish, replace(cluster, workers=count)))
            for count in counts
        ]

    # The rest ------------------------------------------------------------------------------------

    def _memory(self, wish: Wish, cluster: Cluster) -> dict[str, float]:
        memory, kinds = self._costs.memory, self._costs.kinds
        slot = sum(kind.share * memory.slot_bytes[kind.template] for kind in kinds)
        per_worker = (
            memory.worker_bytes + memory.templates_bytes + SLOTS_PER_CORE * cluster.cores * slot
        )
        result = sum(kind.share * kind.result_bytes for kind in kinds)
        kept = result * self._rate(wish) * (RESULTS_S if wish.think_s else wish.p99_s)
        payload = sum(kind.share * kind.request_bytes for kind in kinds)
        waiting = wish.in_flight * (memory.waiting_valkey_bytes + payload)
        return {
            "gateways": cluster.gateways * memory.gateway_bytes
            + wish.in_flight * (memory.waiting_gateway_bytes + payload),
            "shards": cluster.shards * SHARD_BASE_BYTES + waiting + kept,
            "workers": cluster.workers * per_worker,
        }

    def _notes(self, wish: Wish) -> list[str]:
        notes: list[str] = []
        stopped = [kind for kind in self._costs.kinds if kind.stopped]
        if stopped and wish.of == "finished":
            share = sum(kind.share for kind in stopped)
            notes.append(
                f"{share:.0%} of the runs are stopped at their own time limit: their CPU counts,"
                " their latency does not (--of all)."
            )
        if wish.cores_per_worker and wish.cores_per_worker > self.most_cores():
            notes.append(
                f"One worker process keeps about {self.most_cores()} cores busy with this mix; with"
                f" {wish.cores_per_worker} its one thread is the limit."
            )
        notes.append(
            "Memory is for the service and small programs; add what the programs themselves take."
        )
        return notes


def _growing() -> list[int]:
    """1, 2, 3, … with steps of two percent, up to a hundred thousand."""
    found: list[int] = []
    workers = 1
    while workers < 100_000:
        found.append(workers)
        workers = max(workers + 1, math.ceil(workers * 1.02))
    return found
