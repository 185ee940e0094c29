"""The soak's verdict: a leak is seen, and neither noise nor a warm-up is taken for one."""

import random

import pytest

from rollyard_loadtest.footprint import Resource
from rollyard_loadtest.growth import Sample, growth
from rollyard_loadtest.mix import draw

RESOURCE = Resource("things", noise=5)


def _samples(values: list[float]) -> list[Sample]:
    return [Sample(100 * n, 10.0 * n, {"things": value}) for n, value in enumerate(values)]


def test_a_leak_is_seen_through_noise() -> None:
    chance = random.Random(1)
    found = growth(_samples([50 + 0.2 * n + chance.uniform(-3, 3) for n in range(100)]), RESOURCE)
    assert not found.flat
    assert found.per_10k == pytest.approx(20, rel=0.2)


def test_noise_a_spike_and_a_warm_up_are_not_growth() -> None:
    chance = random.Random(2)
    warm = [float(n) for n in range(25)]
    level = [25 + chance.uniform(-3, 3) for _ in range(75)]
    level[40] = 500.0
    assert growth(_samples(warm + level), RESOURCE).flat


def test_shrinking_is_no_growth_and_what_has_no_noise_is_not_judged() -> None:
    assert growth(_samples([100.0 - n for n in range(40)]), RESOURCE).flat
    assert growth(_samples([float(n) for n in range(40)]), Resource("things", noise=None)).flat


def test_two_samples_after_the_warm_up_are_needed() -> None:
    with pytest.raises(ValueError, match="too few"):
        growth(_samples([1.0]), RESOURCE)


def test_the_mix_is_the_same_for_the_same_seed_and_has_every_kind() -> None:
    kinds = [job.kind for job in draw(range(2000), seed=7)]
    assert kinds == [job.kind for job in draw(range(2000), seed=7)]
    assert kinds != [job.kind for job in draw(range(2000), seed=8)]
    assert len(set(kinds)) == 16
