"""What a worker counts, in Prometheus terms; exported only where a port is given.

docs/metrics.md lists every name and label; a test compares both with what is exposed. Counting
belongs to the worker's loop; the endpoint's thread reads gauges from what ``watch()`` was given.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollyard import __version__
from rollyard.types import OUTCOMES
from rollyard_queue.records import Delivery
from rollyard_sandbox.pool import Pool
from rollyard_sandbox.reports import ResultRecord

log = logging.getLogger(__name__)

BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0),
)
"""Upper bounds in seconds, as the gateway's."""
PEAK_BUCKETS_BYTES = tuple(float(1 << power) for power in range(22, 36, 2))
"""4 MiB to 16 GiB."""


class Held(NamedTuple):
    """How many runs a worker has, by what they do; asked when somebody looks."""

    starting: int
    """Claimed; they wait for a core or a slot."""
    running: int
    unsent: int
    """Ended; their results are on the way."""
    given_up: int
    """Results that the queue did not take in a minute: others run these again."""


class _OneKind(NamedTuple):
    """The counters of one outcome in one template, looked up once."""

    runs: Counter
    queued: Histogram
    wall: Histogram
    total: Histogram
    cpu: Counter
    peak: Histogram


class WorkerMetrics:
    """Counters of one worker, in a registry of their own."""

    def __init__(self, slots: int, *, missing: Sequence[str] = ()) -> None:
        disable_created_metrics()  # a second series for each, which nobody asks for
        self.registry = CollectorRegistry()
        self._runs = self._counter("runs", "Runs that ended.", "outcome")
        for outcome in OUTCOMES:
            self._runs.labels(outcome)
        labels = ("outcome", "template")
        self._queued = self._histogram("run_queued_seconds", "From admission to start.", labels)
        self._wall = self._histogram("run_wall_seconds", "Wall clock of programs.", labels)
        self._total = self._histogram("run_total_seconds", "From admission to end.", labels)
        self._cpu = self._counter("run_cpu_seconds", "CPU time of programs.", "template")
        self._peak = self._histogram(
            "run_peak_memory_bytes", "Most memory of a run.", ("template",), PEAK_BUCKETS_BYTES
        )
        self._of: dict[tuple[str, str], _OneKind] = {}
        self._claims = self._counter("claims", "Times that the queue was asked for runs.")
        self._claimed = self._counter("claimed_runs", "Runs that it gave.")
        self._redelivered = self._counter("redelivered_runs", "Of these: others had them before.")
        self._renewed = self._counter("leases_renewed", "Leases extended.")
        self._lost = self._counter("leases_lost", "Leases that others had taken meanwhile.")
        self._slots_lost = self._counter("slots_lost", "Slots that ended without a report.")
        self._queue_errors = self._counter("queue_errors", "Calls that the queue did not answer.")
        self._gauge("max_slots", "Runs that this worker runs at once.").set(slots)
        layers = self._gauge("layer_missing", "1: the machine lacks this wall.", "layer")
        for layer in missing:
            layers.labels(layer).set(1)
        self._gauge("info", "Always 1; the version is the label.", "version").labels(
            __version__
        ).set(1)
        ProcessCollector(registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"rollyard_worker_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"rollyard_worker_{name}", what, labels, registry=self.registry)

    def _histogram(
        self, name: str, what: str, labels: Sequence[str], bounds: Sequence[float] = BUCKETS_S
    ) -> Histogram:
        return Histogram(
            f"rollyard_worker_{name}", what, labels, buckets=bounds, registry=self.registry
        )

    def watch(self, pool: Pool, held: Callable[[], Held]) -> None:
        """Export the gauges of a pool and of its worker too."""
        self.registry.register(_Gauges(pool, held))

    def observe(self, result: ResultRecord) -> None:
        """Count a run that a slot has run."""
        labels = (result.outcome, result.template)
        count = self._of.get(labels)
        if count is None:
            count = self._of[labels] = _OneKind(
                self._runs.labels(result.outcome),
                self._queued.labels(*labels),
                self._wall.labels(*labels),
                self._total.labels(*labels),
                self._cpu.labels(result.template),
                self._peak.labels(result.template),
            )
        count.runs.inc()
        count.queued.observe(result.queued_ms / 1e3)
        count.wall.observe(result.wall_ms / 1e3)
        count.total.observe((result.queued_ms + result.wall_ms) / 1e3)
        count.cpu.inc(max(0.0, result.cpu_ms / 1e3))
        if result.peak_memory_bytes:
            count.peak.observe(result.peak_memory_bytes)

    def count_fault(self) -> None:
        """Count a run that ended as ``infra_error`` here: it has no times."""
        self._runs.labels("infra_error").inc()

    def count_claim(self, deliveries: Sequence[Delivery]) -> None:
        """Count one claim and what it brought."""
        self._claims.inc()
        self._claimed.inc(len(deliveries))
        self._redelivered.inc(sum(delivery.attempt > 1 for delivery in deliveries))

    def count_renewal(self, asked: int, lost: int) -> None:
        """Count leases that were asked for again, and those of them that were not given."""
        self._renewed.inc(asked - lost)
        self._lost.inc(lost)

    def count_lost_slot(self) -> None:
        """Count a slot that ended without a report, or could not be made."""
        self._slots_lost.inc()

    def count_queue_error(self) -> None:
        """Count a call that the queue did not answer."""
        self._queue_errors.inc()


@contextlib.contextmanager
def endpoint(metrics: WorkerMetrics, host: str, port: int | None) -> Generator[None]:
    """Serve ``/metrics`` from a thread within the block; port 0 takes a free one, None: nothing.

    Raises:
        OSError: the address cannot be had; the message names it.
    """
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise OSError(f"metrics cannot be served at {host}:{port}: {error}") from error
    log.info("metrics.listening", extra={"address": f"http://{host}:{server.server_port}"})
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Gauges(Collector):
    def __init__(self, pool: Pool, held: Callable[[], Held]) -> None:
        self._pool = pool
        self._held = held

    def collect(self) -> Iterator[Metric]:
        held, state = self._held(), self._pool.state()
        runs = _gauge("runs_held", "Claimed runs by what they do.", "state")
        runs.add_metric(("starting",), held.starting)
        runs.add_metric(("running",), held.running)
        runs.add_metric(("unsent",), held.unsent)
        yield runs
        slots = _gauge("slots", "Slots by state; unmade ones are made when needed.", "state")
        slots.add_metric(("busy",), state.busy)
        slots.add_metric(("idle",), state.idle)
        slots.add_metric(("unmade",), state.unmade)
        yield slots
        up = _gauge("template_up", "1 while the warm interpreter lives.", "template")
        memory = _gauge("template_memory_bytes", "Resident memory of it.", "template")
        for name, resident_bytes in state.templates.items():
            up.add_metric((name,), float(resident_bytes > 0))
            memory.add_metric((name,), resident_bytes)
        yield up
        yield memory
        yield _gauge("programs_memory_bytes", "Of all programs.", value=state.programs_bytes)
        made = _counter("slots_made", "Slots cloned.", "template")
        for name, count in state.slots_made.items():
            made.add_metric((name,), count)
        yield made
        restarts = _counter("template_restarts", "Warm interpreters that died.", "template")
        for name, count in state.restarts.items():
            restarts.add_metric((name,), count)
        yield restarts
        yield _counter("results_given_up", "Results that were not taken.", value=held.given_up)


def _gauge(
    name: str, what: str, label: str | None = None, *, value: float | None = None
) -> GaugeMetricFamily:
    labels = None if label is None else (label,)
    return GaugeMetricFamily(f"rollyard_worker_{name}", what, value=value, labels=labels)


def _counter(
    name: str, what: str, label: str | None = None, *, value: float | None = None
) -> CounterMetricFamily:
    labels = None if label is None else (label,)
    return CounterMetricFamily(f"rollyard_worker_{name}", what, value=value, labels=labels)
