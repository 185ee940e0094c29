"""Poisoner and victim in the same slot and template, thousands of times, and poisons mutated.

``scripts/soak --leaks N`` does the same with as many as one likes.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from changed_guest import change_guest
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


@requirement("leak.nothing")
def test_a_hunt_finds_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are kept from run to run, instead of replaced."""
    kept = "        for path in (WORK, TMP, SHM):\n            with contextlib.suppress"
    with tempfile.TemporaryDirectory() as folder:
        change_guest(monkeypatch, Path(folder), "box.py", kept, f"        return\n{kept}")
        with Hunter(("bare",)) as hunter:
            leaks = hunter.run(hunter.hunt.listed("bare", 1))
            assert "modes and attributes" in " ".join(leaks), leaks
            with pytest.raises((AssertionError, ExceptionGroup)):
                hunter.mutations(200)
