"""What a worker counts, in Prometheus terms; exported only where a port is given."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_WALL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class WorkerMetrics:
    def __init__(self, slots: int) -> None:
        self.registry = CollectorRegistry()
        self._runs = Counter(
            "rollyard_worker_runs",
            "Runs that ended, by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self._wall = Histogram(
            "rollyard_worker_run_wall_seconds", "Wall clock of programs",
            buckets=_WALL_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._busy = Gauge("rollyard_worker_busy_slots", "Slots in use", registry=self.registry)
        Gauge("rollyard_worker_slots", "Slots", registry=self.registry).set(slots)

    def observe(self, outcome: str, wall_ms: float) -> None:
        self._runs.labels(outcome).inc()
        self._wall.observe(wall_ms / 1e3)

    def busy(self, slots: int) -> None:
        self._busy.set(slots)
