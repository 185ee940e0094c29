"""How a command that prints ends, when nobody reads what it prints."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Never, NoReturn, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LOST = 3
"""Exit code where the output could not be written, such as on a full disk."""


class _Output(io.FileIO):
    """Standard output. A fault of its own ends the command; so no other can be taken for it."""

    def write(self, b: "ReadableBuffer", /) -> int | None:
        try:
            return super().write(b)
        except BrokenPipeError:  # the reader, such as head, has seen enough
            self._end(0)
        except OSError as error:
            sys.stderr.write(f"rollyard: cannot write the output: {error.strerror}\n")
            self._end(LOST)

    def _end(self, code: int) -> Never:
        _discard(self.fileno())  # else the interpreter would try once more at its end
        raise SystemExit(code) from None


class _Errors(io.FileIO):
    """Standard error. Where nobody reads it any more, the work and its exit code matter still."""

    def write(self, b: "ReadableBuffer", /) -> int | None:
        with contextlib.suppress(BrokenPipeError):
            return super().write(b)
        _discard(self.fileno())
        return super().write(b)


def end_with(work: Callable[[], int]) -> NoReturn:
    """Do the work of a command, see that its output is written, and exit with its code.

    A reader that goes, such as head, ends the work in silence with 0; one that goes after the work
    changes nothing. Output that cannot be written is a line and 3. Both concern standard output
    alone: what befalls other pipes and sockets is for the work to explain.
    """
    sys.stdout = _over(sys.stdout, _Output)
    sys.stderr = _over(sys.stderr, _Errors)
    code: int | str | None
    try:
        code = work()
    except SystemExit as ended:
        code = ended.code
    try:
        if not sys.stdout.closed:
            sys.stdout.flush()  # not at the interpreter's end, which would call a closed pipe 120
    except SystemExit as ended:
        code = code or ended.code
    sys.exit(code)


def _over(stream: TextIO | None, kind: type[io.FileIO]) -> TextIO:
    """The same stream, written through ``kind``; one that the caller closed goes nowhere."""
    if stream is None:
        return Path(os.devnull).open("w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = kind(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # PYTHONUNBUFFERED: at once
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _discard(descriptor: int) -> None:
    """Whatever is still written there goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
