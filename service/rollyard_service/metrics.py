"""What /metrics tells about one gateway process."""

from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rollyard.types import OUTCOMES

QUEUE_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 900)
RUN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 600)


class _Gist(msgspec.Struct):
    """The few fields of a result that are counted; msgspec skips the rest without copying it."""

    outcome: str
    queued_ms: float = 0.0
    wall_ms: float = 0.0


class Metrics:
    """Counters of one process, in a registry of their own."""

    def __init__(self, *, in_flight: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollyard_gateway_requests",
            "HTTP requests answered.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        runs = Counter(
            "rollyard_gateway_runs",
            "Results delivered to callers of this process.",
            ("outcome",),
            registry=self._registry,
        )
        self._runs = {outcome: runs.labels(outcome) for outcome in OUTCOMES}
        self._other = runs.labels("other")
        self._queued = Histogram(
            "rollyard_gateway_run_queued_seconds",
            "From admission until a worker started the run.",
            buckets=QUEUE_BUCKETS_S,
            registry=self._registry,
        )
        self._wall = Histogram(
            "rollyard_gateway_run_wall_seconds",
            "Wall clock of the program.",
            buckets=RUN_BUCKETS_S,
            registry=self._registry,
        )
        gauge = Gauge(
            "rollyard_gateway_runs_in_flight",
            "Runs that callers of this process wait for.",
            registry=self._registry,
        )
        gauge.set_function(in_flight)
        self._decode = msgspec.json.Decoder(_Gist).decode

    def count_result(self, result: bytes) -> None:
        """Count a delivered result; one that is malformed counts as other."""
        try:
            gist = self._decode(result)
        except msgspec.MsgspecError:
            self._other.inc()
            return
        self._runs.get(gist.outcome, self._other).inc()
        if gist.outcome != "infra_error":  # those carry no measured times
            self._queued.observe(gist.queued_ms / 1000)
            self._wall.observe(gist.wall_ms / 1000)

    def count_request(self, method: str, route: str, status: int) -> None:
        """Count an answered request under its route's pattern, never under its raw path."""
        self._requests.labels(method, route, str(status)).inc()

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)
