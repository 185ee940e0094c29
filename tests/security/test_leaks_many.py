"""Poisoner and victim in the same slot and template, thousands of times, and poisons mutated.

``scripts/soak --leaks N`` does the same with as many as one likes.
"""

from collections.abc import Iterator

import pytest
from leak_hunt import Hunter
from poisons import POISONS
from requirements import requirement


@pytest.fixture(scope="module")
def hunter() -> Iterator[Hunter]:
    with Hunter() as made:
        yield made


@requirement("leak.nothing")
@pytest.mark.parametrize(("template", "times"), [("bare", 80), ("science", 25)])
def test_no_victim_sees_anything_of_its_poisoner(hunter: Hunter, template: str, times: int) -> None:
    before = hunter.hunt.pairs.copy()
    assert hunter.run(hunter.hunt.listed(template, times)) == []
    done = hunter.hunt.pairs - before
    assert done.keys() == POISONS.keys()
    assert done.total() > 17 * times


@requirement("leak.nothing")
def test_no_mutation_of_the_poisons_is_seen_either(hunter: Hunter) -> None:
    hunter.mutations(200)
