"""Does a quantity grow? Samples over runs become a slope, and the slope a verdict."""

from dataclasses import dataclass
from statistics import median

from rollyard_loadtest.footprint import Resource

_WARM_SHARE = 0.25
_WARM_S = 75.0  # results live a minute in Valkey: until then its memory only rises


@dataclass(frozen=True)
class Sample:
    """What was occupied after so many runs."""

    runs: int
    elapsed_s: float
    values: dict[str, float]


@dataclass(frozen=True)
class Growth:
    """How one resource went, in its own unit."""

    resource: Resource
    first: float
    last: float
    highest: float
    per_10k: float
    """By the Theil-Sen slope: the median over all pairs, which a few odd samples do not move."""
    over_all: float
    """The slope times the runs that it was taken over."""

    @property
    def flat(self) -> bool:
        return self.resource.noise is None or self.over_all <= self.resource.noise


def measured(samples: list[Sample]) -> list[Sample]:
    """The samples after the warm-up, in which caches fill and slots are made."""
    last = samples[-1]
    warm_s = min(_WARM_S, last.elapsed_s / 2)
    return [s for s in samples if s.runs >= last.runs * _WARM_SHARE and s.elapsed_s >= warm_s]


def growth(samples: list[Sample], resource: Resource) -> Growth:
    """Fit one resource; at least two samples after the warm-up.

    Raises:
        ValueError: there are fewer.
    """
    kept = measured(samples)
    if len(kept) < 2:
        raise ValueError("too few samples after the warm-up")
    values = [s.values[resource.name] / resource.scale for s in kept]
    slopes = [
        (values[j] - values[i]) / (kept[j].runs - kept[i].runs)
        for i in range(len(kept))
        for j in range(i + 1, len(kept))
    ]
    slope = median(slopes)
    span = kept[-1].runs - kept[0].runs
    return Growth(resource, values[0], values[-1], max(values), slope * 10_000, slope * span)
