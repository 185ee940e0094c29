"""A discrete-event simulation of a whole service: from a caller's request to its answer.

    client → gateway → shard's queue → worker's claim → start gate → cores → worker → shard
           → gateway → client

What a run costs in each part is measured (``costs``); how parts take turns is what their code
does: workers claim as ``rollyard_sandbox.worker`` (room, prefetch, one claim at a time, results in
batches), and runs start as ``rollyard_sandbox.gate`` lets them (two for each core; after 5 ms and
then every 25 a place is taken back from what does not compute, after half a second from all). Cores
are shared as Linux does (``simulation_events.Cores``). The same seed gives the same result, to the
last digit.

Left out: making slots, memory, the network, retries and refusals. A program that is stopped at its
time limit is one that computes as long as its limit, or until three times the limit has passed.
"""

import random
from collections import deque
from collections.abc import Callable
from itertools import accumulate

from rollyard_loadtest.simulation_events import Calendar, Cores, Process
from rollyard_loadtest.simulation_model import Arrivals, Cluster, RunClass, Simulated
from rollyard_loadtest.simulation_worker import Run, Shard, Worker


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
        self._trace = iter(arrivals.trace)
        self._result = Simulated()
        self._in_system, self._area, self._since_s = 0, 0.0, 0.0
        self._worker_cores: list[Cores] = []
        self.idle: deque[Worker] = deque()
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
        self._shards = [Shard(process(n)) for n in range(cluster.shards)]
        self._workers = [
            Worker(self, machine, Process(machine), self._shards) for machine in machines
        ]

    def run(self) -> Simulated:
        """Simulate until every run that arrived has been answered."""
        load = self._arrivals
        match load.kind:
            case "poisson" if load.trace:
                for at_s, _ in load.trace:
                    self.calendar.after(at_s, self._arrive)
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
        _, kind = next(self._trace, (0.0, None))
        if kind is None:
            [kind] = self.chance.choices(self._classes, cum_weights=self._bounds)
        number = self._result.arrived
        self._result.arrived += 1
        run = Run(kind, self.calendar.now_s, self._shards[number % len(self._shards)])
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

    def finished(self, run: Run) -> None:
        """The queue has its result."""
        cluster = self.cluster
        gateway = self._gateways[self._result.answered % len(self._gateways)]

        def at_client() -> None:
            self._client.do(cluster.client_s / 2, lambda: self._answer(run))

        self.via(gateway, cluster.gateway_s / 2, at_client)

    def _answer(self, run: Run) -> None:
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
