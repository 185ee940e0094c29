"""What /metrics tells about one gateway process, and about the queue that it looks at.

docs/metrics.md lists every name and label; a test compares both with what is exposed. No label
takes a value that a caller makes up: routes are patterns, and jobs are no label at all.
"""

from collections.abc import Callable, Iterable
from typing import get_args

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from rollyard import __version__
from rollyard.types import ErrorResponse
from rollyard_queue.records import QueueStats
from rollyard_service.queue_figures import QueueFigures
from rollyard_service.run_times import RunTimes

REFUSALS = (
    *(word for word in get_args(ErrorResponse.model_fields["error"].annotation)),
    *("job_full", "busy", "caller_gone", "other"),
)
"""Why requests are refused: the words of ErrorResponse.error, and four more."""
OTHER = "other"
CALLER_GONE = 499


class _Gist(msgspec.Struct):
    """The few fields of a result that are counted; msgspec skips the rest without copying it."""

    outcome: str
    template: str = ""
    queued_ms: float = 0.0
    wall_ms: float = 0.0


class Metrics:
    """Counters of one process, in a registry of their own. All methods belong to one thread."""

    def __init__(
        self,
        *,
        in_flight: Callable[[], float],
        held_bytes: Callable[[], float] = lambda: 0.0,
        max_queued: int = 0,
        max_queued_bytes: int = 0,
        max_held_bytes: int = 0,
    ) -> None:
        disable_created_metrics()  # a second series for each, which nobody asks for
        self._registry = CollectorRegistry()
        self._times = RunTimes()
        self._registry.register(self._times)
        self._queue = QueueFigures(max_queued=max_queued, max_queued_bytes=max_queued_bytes)
        self._registry.register(self._queue)
        ProcessCollector(registry=self._registry)
        self._requests = self._counter(
            "requests", "HTTP requests answered.", "method", "route", "status"
        )
        self._refusals = self._counter("refusals", "HTTP requests refused.", "reason")
        for reason in REFUSALS:
            self._refusals.labels(reason)
        self._admitted = self._counter("runs_admitted", "Runs that the queue took.")
        self._not_admitted = self._counter(
            "runs_refused", "Runs that the queue did not take.", "reason"
        )
        for reason in ("overloaded", "unavailable", "conflict"):
            self._not_admitted.labels(reason)
        self._asked_again = self._counter(
            "runs_asked_again", "Runs submitted again under their id: late, or after an outage."
        )
        self._reaped = self._counter(
            "leases_reaped", "Runs taken back from workers whose lease had ended, or expired."
        )
        self._gauge("runs_in_flight", "Runs that callers of this process wait for.").set_function(
            in_flight
        )
        self._gauge("held_bytes", "Bytes of requests in flight here.").set_function(held_bytes)
        bound = self._gauge("max_held_bytes", "Bound on them; beyond it requests are refused.")
        bound.set(max_held_bytes)
        self._gauge("info", "Always 1; the version is the label.", "version").labels(
            __version__
        ).set(1)
        self._seen: dict[tuple[str, str, int], Counter] = {}
        self._decode = msgspec.json.Decoder(_Gist).decode

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"rollyard_gateway_{name}", what, labels, registry=self._registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"rollyard_gateway_{name}", what, labels, registry=self._registry)

    def count_results(self, results: Iterable[tuple[bytes, float]]) -> None:
        """Count delivered results, each with the seconds since its request came.

        One that is malformed counts as ``other``.
        """
        decode, observe = self._decode, self._times.observe
        for result, total_s in results:
            try:
                gist = decode(result)
            except msgspec.MsgspecError:
                gist = _Gist(OTHER)
            observe(gist.outcome, gist.template, gist.queued_ms / 1e3, gist.wall_ms / 1e3, total_s)

    def count_admitted(self, runs: int) -> None:
        """Count runs that the queue took."""
        self._admitted.inc(runs)

    def count_not_admitted(self, runs: int, reason: str) -> None:
        """Count runs that the queue did not take: one of the reasons above."""
        self._not_admitted.labels(reason).inc(runs)

    def count_asked_again(self, runs: int) -> None:
        """Count runs that were submitted once more by us."""
        self._asked_again.inc(runs)

    def count_reaped(self, runs: int) -> None:
        """Count runs that this process took back from workers, or expired."""
        self._reaped.inc(runs)

    def count_request(
        self, method: str, route: str, status: int, *, refused_as: str | None = None
    ) -> None:
        """Count an answered request under its route's pattern, never under its raw path."""
        seen = self._seen.get((method, route, status))
        if seen is None:
            seen = self._requests.labels(method, route, str(status))
            self._seen[method, route, status] = seen
        seen.inc()
        if status >= 400:
            if status == CALLER_GONE:
                refused_as = "caller_gone"
            self._refusals.labels(refused_as if refused_as in REFUSALS else OTHER).inc()

    def render(self, stats: QueueStats | None = None) -> bytes:
        """The Prometheus text format; without ``stats`` the queue is said to be down."""
        self._queue.stats = stats
        return generate_latest(self._registry)
