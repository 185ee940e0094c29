"""Cutting a stream of bytes into lines."""

import time

from hypothesis import given
from hypothesis import strategies as st

from rollyard._lines import LineSplitter


@given(st.lists(st.binary().map(lambda line: line.replace(b"\n", b"")), max_size=20), st.data())
def test_lines_survive_every_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines) + b"unfinished"
    splitter = LineSplitter()
    found: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += splitter.feed(stream[:size])
        stream = stream[size:]
    assert found == [line for line in lines if line]


def test_only_newline_ends_a_line() -> None:
    line = "a\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029b".encode()
    assert LineSplitter().feed(line + b"\n") == [line]
    assert LineSplitter().feed(b"") == []


def test_long_line_in_small_chunks_is_linear() -> None:
    def seconds(chunks: int) -> float:
        splitter = LineSplitter()
        started = time.process_time()
        for _ in range(chunks):
            assert splitter.feed(b"x" * 1000) == []
        assert len(splitter.feed(b"\n")[0]) == chunks * 1000
        return time.process_time() - started

    seconds(1000)
    assert seconds(40_000) < 50 * max(seconds(4_000), 0.001)
