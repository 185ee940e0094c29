"""Intervals beside every number.

Scores are arrays (S, P, K): seeds (training runs), problems, samples; an evaluation of one
model has S = 1. NaN marks a sample that the service or the verifier failed; it counts nowhere.
All resampling is hierarchical: seeds, then problems, then samples within each. Resampling below
the top counts chance twice, so that intervals are rather too wide. Resampling few seeds is too
narrow (of 3, percentile intervals hold the truth 74 times of 100): what is found is stretched to
the width of Student's interval (T. Hesterberg, *The American Statistician* 69 (2015) 371, 4.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
_NORMAL = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its 95% bootstrap percentile interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def _of(value: float, draws: np.ndarray, units: int) -> Interval:
    """``units``: what was drawn from at the top; a single one was not drawn at all."""
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    wider = student(units - 1) / _NORMAL * math.sqrt(units / (units - 1)) if units > 1 else 1.0
    return Interval(
        value, value + (float(low) - value) * wider, value + (float(high) - value) * wider
    )


def student(freedom: int) -> float:
    """97.5% quantile of Student's t with so many degrees of freedom, to three digits."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(freedom * math.pi)
    at = np.linspace(0.0, 13.0, 130_001)
    density = scale * (1 + at**2 / freedom) ** (-(freedom + 1) / 2)
    below = 0.5 + (np.cumsum(density) - (density + density[0]) / 2) * (at[1] - at[0])
    return float(at[np.searchsorted(below, 0.975)])


def _resampled(scores: np.ndarray, seeds: np.ndarray, problems: np.ndarray,
               rng: np.random.Generator) -> float:  # fmt: skip
    picked = scores[np.ix_(seeds, problems)]
    sample = rng.integers(scores.shape[2], size=picked.shape)
    drawn = np.take_along_axis(picked, sample, axis=2)
    known = np.isfinite(drawn)
    return float(np.where(known, drawn, 0).sum() / known.sum()) if known.any() else float("nan")


def average_at_k(scores: np.ndarray, *, seed: int = 0) -> Interval:
    """Mean score, with seeds, problems and samples resampled."""
    rng = np.random.default_rng(seed)
    seeds, problems, _ = scores.shape
    draws = np.array([
        _resampled(scores, rng.integers(seeds, size=seeds), rng.integers(problems, size=problems),
                   rng) for _ in range(RESAMPLES)
    ])  # fmt: skip
    return _of(float(np.nanmean(scores)), draws, seeds)


def difference(left: np.ndarray, right: np.ndarray, *, seed: int = 0) -> Interval:
    """Mean of ``left`` minus mean of ``right``, paired by seed and by problem.

    Raises:
        ValueError: they have not the same seeds and problems.
    """
    if left.shape[:2] != right.shape[:2]:
        raise ValueError(f"not paired: {left.shape[:2]} and {right.shape[:2]} seeds and problems")
    rng = np.random.default_rng(seed)
    seeds, problems, _ = left.shape
    draws: list[float] = []
    for _ in range(RESAMPLES):
        s, p = rng.integers(seeds, size=seeds), rng.integers(problems, size=problems)
        draws.append(_resampled(left, s, p, rng) - _resampled(right, s, p, rng))
    return _of(float(np.nanmean(left) - np.nanmean(right)), np.array(draws), seeds)


def paired(left: Sequence[float], right: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean difference of one figure per seed (an error share, say), seeds resampled in pairs.

    Pairs of which one is NaN are left out. One pair has no interval: its bounds are NaN.
    """
    delta = np.asarray(left, dtype=float) - np.asarray(right, dtype=float)
    delta = delta[~np.isnan(delta)]
    if len(delta) < 2:
        return Interval(float(delta.mean()) if len(delta) else math.nan, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    draws = delta[rng.integers(len(delta), size=(RESAMPLES, len(delta)))].mean(axis=1)
    return _of(float(delta.mean()), draws, len(delta))


def problems_needed(
    gap: float, *, accuracy: float, k: int = 16, correlation: float = 0.5, within: float = 0.3
) -> int:
    """How many problems show a true difference of ``gap`` with 80% power at the 5% level.

    Args:
        gap: Difference of mean accuracy, such as 0.03.
        accuracy: About where the models are, 0 to 1.
        k: Samples per problem.
        correlation: Between the two models' per-problem accuracies.
        within: Share of the variance of one sample that is chance, not the problem.

    The variance of a problem's mean is ``p(1-p) ((1-within) + within/k)``; the difference of two
    has twice that, less what the pairing takes away.
    """
    if not 0 < gap < 1 or not 0 < accuracy < 1 or k < 1:
        raise ValueError("gap and accuracy are between 0 and 1, k is at least 1")
    spread = accuracy * (1 - accuracy)
    between, chance = spread * (1 - within), spread * within / k
    variance = 2 * (between * (1 - correlation) + chance)
    quantiles = 1.959964 + 0.841621
    return int(np.ceil(variance * (quantiles / gap) ** 2))
