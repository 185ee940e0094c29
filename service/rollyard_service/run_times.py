"""Histograms of runs' times by outcome and template, cheap enough for each of 40,000 runs a second.

prometheus-client's own ``Histogram.observe`` takes about 2 µs and a lock, three of them for each
run. Here a run costs a few appends; values are sorted into buckets many at a time, by C code.
"""

from bisect import bisect_right
from collections.abc import Iterator
from math import inf

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from rollyard.types import OUTCOMES

BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0),
)
"""Upper bounds in seconds: from a short program on an idle service to the longest wait."""
TEMPLATES = ("bare", "science", "plot", "fresh", "null")
NO_TEMPLATE = "none"
"""The run never reached a template: it expired, was cancelled, or failed on our side."""
OTHER = "other"
"""Whatever a newer worker may write: labels take no value that is not known here."""
MAX_SPELLINGS = 256
"""Pairs of outcome and template, as workers write them, that are looked up at once."""
FOLD_AT = 4096
"""Values kept until they are sorted into buckets: 100 KiB for each series, at most."""

_FAMILIES = (
    ("rollyard_gateway_run_queued_seconds", "From admission until a worker started the run."),
    ("rollyard_gateway_run_wall_seconds", "Wall clock of the program."),
    ("rollyard_gateway_run_total_seconds", "From its request until its result was here."),
)
_TOTAL = 2


class Buckets:
    """One histogram without labels. Values are kept until enough are there, or somebody looks."""

    def __init__(self) -> None:
        self.pending: list[float] = []
        """Seconds, not yet counted; append to it, and fold() from time to time."""
        self.cumulative = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def fold(self) -> None:
        """Count what is pending."""
        values = self.pending
        self.pending = []
        values.sort()
        self.sum_s += sum(values)
        for index, bound in enumerate(BUCKETS_S):
            self.cumulative[index] += bisect_right(values, bound)
        self.cumulative[-1] += len(values)


class RunTimes(Collector):
    """Runs counted by outcome; their queue, run and total time by outcome and template."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], tuple[Buckets, Buckets, Buckets]] = {}
        self._found: dict[tuple[str, str], tuple[Buckets, Buckets, Buckets]] = {}

    def observe(
        self, outcome: str, template: str, queued_s: float, wall_s: float, total_s: float
    ) -> None:
        """Take one run. A run without a template has no wall clock."""
        series = self._found.get((outcome, template))
        if series is None:
            series = self._find(outcome, template)
        queued, wall, total = series
        if outcome != "infra_error":  # those carry no measured times
            queued.pending.append(queued_s)
            if template:
                wall.pending.append(wall_s)
        total.pending.append(total_s)
        if len(total.pending) >= FOLD_AT:
            for one in series:
                one.fold()

    def _find(self, outcome: str, template: str) -> tuple[Buckets, Buckets, Buckets]:
        labels = _known(outcome, template)
        series = self._series.setdefault(labels, (Buckets(), Buckets(), Buckets()))
        if len(self._found) < MAX_SPELLINGS:
            self._found[outcome, template] = series
        return series

    def collect(self) -> Iterator[Metric]:
        """The counter and the three histograms, as prometheus-client wants them."""
        runs: dict[str, int] = dict.fromkeys((*OUTCOMES, OTHER), 0)
        names = [floatToGoString(bound) for bound in (*BUCKETS_S, inf)]
        for index, (name, what) in enumerate(_FAMILIES):
            family = HistogramMetricFamily(name, what, labels=("outcome", "template"))
            for labels, series in self._series.items():
                buckets = series[index]
                buckets.fold()
                counted = list(zip(names, map(float, buckets.cumulative), strict=True))
                family.add_metric(labels, counted, buckets.sum_s)
                if index == _TOTAL:
                    runs[labels[0]] += buckets.cumulative[-1]
            yield family
        counter = CounterMetricFamily(
            "rollyard_gateway_runs",
            "Results delivered to callers of this process.",
            labels=("outcome",),
        )
        for outcome, count in runs.items():
            counter.add_metric((outcome,), count)
        yield counter


def _known(outcome: str, template: str) -> tuple[str, str]:
    if outcome not in OUTCOMES:
        outcome = OTHER
    if not template:
        template = NO_TEMPLATE
    elif template not in TEMPLATES:
        template = OTHER
    return outcome, template
