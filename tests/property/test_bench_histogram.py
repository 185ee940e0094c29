"""Histograms of latencies: the error of a quantile is bounded, and merging loses nothing."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard_loadtest.histogram import ERROR, Latencies, merged

TIMES = st.lists(st.floats(0, 86_400, allow_nan=False), min_size=1, max_size=300)
SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0])
MICROSECOND = 1e-6


def _of(times: list[float]) -> Latencies:
    made = Latencies()
    for seconds in times:
        made.record(seconds)
    return made


@settings(deadline=None)
@given(TIMES, SHARES)
def test_a_quantile_is_within_its_error(times: list[float], share: float) -> None:
    rank = max(1, math.floor(share * len(times) + 0.5))
    exact = sorted(times)[rank - 1]
    found = _of(times).quantile_s(share)
    assert found is not None
    assert abs(found - exact) <= exact * ERROR + MICROSECOND


@settings(deadline=None)
@given(TIMES, TIMES)
def test_merged_histograms_are_the_histogram_of_all(
    first: list[float], second: list[float]
) -> None:
    whole, both = _of([*first, *second]), merged([_of(first).encoded(), _of(second).encoded(), ""])
    assert len(both) == len(whole) == len(first) + len(second)
    shares = (0.0, 0.5, 0.9, 0.99, 1.0)
    assert both.quantiles(shares) == whole.quantiles(shares)


@settings(deadline=None)
@given(TIMES)
def test_the_curve_rises_to_the_maximum(times: list[float]) -> None:
    made = _of(times)
    curve = made.curve()
    assert curve == sorted(curve)
    assert curve[-1] == (1.0, made.quantile_s(1.0))


@given(st.floats(86_400, 1e9))
def test_what_is_beyond_the_range_counts_as_its_end(seconds: float) -> None:
    made = _of([seconds, -seconds])
    assert len(made) == 2
    longest, shortest = made.quantile_s(1.0), made.quantile_s(0.0)
    assert longest is not None and math.isclose(longest, 86_400, rel_tol=ERROR)
    assert shortest == pytest.approx(MICROSECOND)


def test_an_empty_histogram_has_no_quantile() -> None:
    made = Latencies()
    assert made.quantile_s(0.5) is None
    assert made.mean_s is None
    assert made.curve() == []


def test_a_text_that_is_no_histogram_is_refused() -> None:
    with pytest.raises(ValueError, match="not an encoded histogram"):
        Latencies.decoded("nonsense")
