"""Arrival processes: what they promise, for any rate, number of clients and seed."""

import math
from itertools import pairwise
from statistics import fmean, median, pstdev

from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard_loadtest.arrivals import Thinking, poisson, share

SEEDS = st.text(st.characters(codec="ascii"), max_size=12)
# A mean of 100 to 5,000 arrivals: enough for statistics, quick enough for many examples.
RATES = st.floats(1.0, 500.0)
MEANS = st.floats(100, 5000)


@settings(deadline=None)
@given(RATES, MEANS, SEEDS)
def test_times_rise_from_0_to_the_end(rate: float, mean: float, seed: str) -> None:
    until_s = mean / rate
    times = list(poisson(rate, until_s, seed))
    assert all(before < after for before, after in pairwise(times))
    assert times[0] > 0
    assert times[-1] < until_s


@settings(deadline=None)
@given(RATES, MEANS, SEEDS)
def test_the_same_seed_gives_the_same_times(rate: float, mean: float, seed: str) -> None:
    first, again = (list(poisson(rate, mean / rate, seed)) for _ in range(2))
    assert first == again
    assert first != list(poisson(rate, mean / rate, seed + "'"))


@settings(deadline=None)
@given(RATES, MEANS, SEEDS)
def test_the_number_of_arrivals_is_that_of_the_rate(rate: float, mean: float, seed: str) -> None:
    # Seven standard deviations of a Poisson variable: once in 10^11 by chance.
    found = len(list(poisson(rate, mean / rate, seed)))
    assert abs(found - mean) < 7 * math.sqrt(mean) + 7


def test_gaps_are_exponential() -> None:
    times = [0.0, *poisson(50.0, 2000.0, "gaps")]
    gaps = [after - before for before, after in pairwise(times)]
    assert math.isclose(fmean(gaps), 1 / 50, rel_tol=0.02)
    assert math.isclose(pstdev(gaps), 1 / 50, rel_tol=0.02)
    assert math.isclose(median(gaps), math.log(2) / 50, rel_tol=0.02)


@settings(deadline=None)
@given(RATES, MEANS, SEEDS, st.integers(2, 8))
def test_clients_together_make_the_rate(rate: float, mean: float, seed: str, clients: int) -> None:
    streams = [
        list(poisson(rate / clients, mean / rate, f"{seed}-{client}")) for client in range(clients)
    ]
    assert abs(sum(map(len, streams)) - mean) < 7 * math.sqrt(mean) + 7
    assert len({tuple(stream) for stream in streams}) == clients


@given(st.integers(0, 100_000), st.integers(1, 64))
def test_shares_sum_up_and_differ_by_at_most_one(total: int, clients: int) -> None:
    shares = [share(total, client, clients) for client in range(clients)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_thinking_has_its_median_and_its_tail() -> None:
    thinking = Thinking(2.0, 30.0, "thinking")
    times = sorted(thinking.draw_s() for _ in range(40_000))
    assert math.isclose(median(times), 2.0, rel_tol=0.05)
    assert math.isclose(times[int(0.99 * len(times))], 30.0, rel_tol=0.1)


@given(SEEDS)
def test_a_rollout_may_not_think_at_all(seed: str) -> None:
    assert Thinking(0.0, 0.0, seed).draw_s() == 0.0
    assert Thinking(0.5, 0.5, seed).draw_s() == 0.5
