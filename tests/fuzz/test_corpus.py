"""Every input of the fuzz corpus, and any bytes beside it, through its target."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import search
import targets
from hypothesis import given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    yield
    targets.close()


@pytest.mark.parametrize("target", targets.TARGETS)
def test_no_input_of_the_corpus_breaks_its_target(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) > 1
    for one in inputs:
        try:
            targets.TARGETS[target](one.read_bytes())
        except BaseException as error:
            error.add_note(f"input: {one}")
            raise


_pieces = st.lists(st.binary(max_size=300), max_size=6).map(lambda some: targets.joined(*some))


@pytest.mark.parametrize("target", targets.TARGETS)
@settings(deadline=None, max_examples=60)
@given(data=_pieces | st.binary(max_size=200))
def test_no_bytes_at_all_break_a_target(target: str, data: bytes) -> None:
    targets.TARGETS[target](data)


def test_the_search_knows_every_target() -> None:
    assert set(search.TARGETS) == set(targets.TARGETS)
