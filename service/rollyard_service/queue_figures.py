"""The queue's own figures as metrics: the same from every gateway, so take max(), never sum()."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollyard_queue.records import QueueStats


class QueueFigures(Collector):
    """Exposes what ``stats`` holds at the moment; None: the queue did not answer."""

    def __init__(self, *, max_queued: int, max_queued_bytes: int) -> None:
        self.stats: QueueStats | None = None
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes

    def collect(self) -> Iterator[Metric]:
        """All but ``up`` and the bounds are absent while the queue does not answer."""
        stats = self.stats
        yield _gauge("up", "1 when the queue answered this scrape.", float(stats is not None))
        yield _gauge(
            "max_runs", "Bound on waiting runs; beyond it runs are refused.", self._max_queued
        )
        yield _gauge(
            "max_bytes", "Bound on their bytes; beyond it runs are refused.", self._max_queued_bytes
        )
        if stats is None:
            return
        yield _gauge("runs", "Runs that wait for a worker.", stats.queued)
        yield _gauge("bytes", "Bytes of the runs that wait.", stats.queued_bytes)
        yield _gauge("oldest_seconds", "Age of the oldest of them.", stats.oldest_queued_ms / 1e3)
        yield _gauge("leases", "Runs that workers hold.", stats.leased)
        yield _gauge("workers", "Workers that announced themselves lately.", stats.workers)
        yield _gauge("slots", "Runs that these can run at once.", stats.slots)
        yield _counter("finished", "Runs that ended.", stats.finished_total)
        yield _counter("redelivered", "Runs given to another worker.", stats.redelivered_total)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"rollyard_queue_{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"rollyard_queue_{name}", what, value=value)
