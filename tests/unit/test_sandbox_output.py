"""KeptOutput: a bound that holds for every stream, and text that is never broken by us."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollyard_sandbox.output import KeptOutput

MARKER = re.compile(r"\n\[\.\.\. (\d+) bytes dropped \.\.\.\]\n")
LIMITS = st.integers(0, 200)
TEXTS = st.text(st.sampled_from("aé中🙂\n"), max_size=300)


def _kept(limit: int, data: bytes, cuts: list[int]) -> KeptOutput:
    """Give ``data`` in pieces that end at ``cuts``."""
    kept = KeptOutput(limit)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    for start, end in pairwise(ends):
        kept.add(data[start:end])
    return kept


@given(LIMITS, st.binary(max_size=600), st.lists(st.integers(0, 600)))
def test_what_fits_is_kept_as_it_came(limit: int, data: bytes, cuts: list[int]) -> None:
    kept = _kept(limit, data, cuts)
    assert kept.total == len(data)
    assert kept.truncated is (len(data) > limit)
    if not kept.truncated:
        assert kept.text() == data.decode("utf-8", "replace")


@given(LIMITS, TEXTS, st.lists(st.integers(0, 1200)))
def test_a_cut_keeps_a_prefix_and_a_suffix_and_counts_the_rest(
    limit: int, text: str, cuts: list[int]
) -> None:
    data = text.encode()
    kept = _kept(limit, data, cuts)
    said = kept.text()
    if not kept.truncated:
        return
    (marker,) = MARKER.finditer(said)
    head, tail = said[: marker.start()].encode(), said[marker.end() :].encode()
    assert data.startswith(head) and data.endswith(tail)
    assert len(head) + len(tail) <= limit
    assert len(head) + int(marker[1]) + len(tail) == len(data)
    # A cut costs at most the rest of one character on each side.
    assert len(head) + len(tail) >= limit - 6
    assert "\ufffd" not in said


@given(LIMITS, st.binary(max_size=600), st.lists(st.integers(0, 600)))
def test_it_makes_no_difference_in_which_pieces_it_came(
    limit: int, data: bytes, cuts: list[int]
) -> None:
    whole, pieces = KeptOutput(limit), _kept(limit, data, cuts)
    whole.add(data)
    assert pieces.text() == whole.text()


@given(st.integers(0, 50_000), st.integers(1, 40))
def test_memory_stays_bounded_while_gigabytes_pass(limit: int, pieces: int) -> None:
    kept = KeptOutput(limit)
    for _ in range(pieces):
        kept.add(b"x" * 65_536)
        held = len(kept._head) + len(kept._tail)  # pyright: ignore[reportPrivateUsage]
        assert held <= 2 * limit + 2 * 65_536
    assert len(kept.text()) <= limit + 60


@given(LIMITS, st.binary(max_size=600))
def test_characters_are_bounded_even_where_no_byte_is_text(limit: int, data: bytes) -> None:
    kept = _kept(limit, b"\xff" * len(data), [])
    assert len(kept.text()) <= limit + 60
