"""Cells of a notebook as one run: the program that executes them, and what came of each.

Guarantees: the whole is bounded by the run's own time limit, from outside; what cells printed and
showed until then is kept. ``cell_timeout_s`` interrupts Python code from inside and is no wall: a
cell in a long C call, or one that means to, runs on until the whole is over.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from rollyard.types import RunResult

_PROGRAM = resources.files(__package__).joinpath("cells_program.py").read_text(encoding="utf-8")
_DROPPED = re.compile(r"\n\[\.\.\. \d+ bytes dropped \.\.\.\]\n")


@dataclass
class Cell:
    """What came of one cell. ``result`` is the value of its last expression, as MIME bundle."""

    stdout: str = ""
    stderr: str = ""
    display: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def shown(self) -> list[dict[str, Any]]:
        """All MIME bundles in order."""
        return [*self.display, *([] if self.result is None else [self.result])]


class CellsProgram:
    """One program for some cells, and the reader of its output."""

    def __init__(
        self,
        cells: Sequence[str],
        *,
        cell_timeout_s: float = 0.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._token = f"\x1e{secrets.token_hex(16)}"
        self._mark = re.compile(re.escape(self._token) + r"(\{.*\})\n")
        values = json.dumps((self._token, list(cells), cell_timeout_s, dict(environment or {})))
        self.code = f"{_PROGRAM}\n\nrun_cells(*json.loads({values!r}))\n"

    def read(self, result: RunResult) -> list[Cell]:
        """The cells that were begun, in order."""
        cells: dict[int, Cell] = {}
        for text, name in ((result.stdout, "stdout"), (result.stderr, "stderr")):
            self._read(text, name, cells)
        return [cells.get(number, Cell()) for number in range(max(cells, default=-1) + 1)]

    def _read(self, text: str, name: str, cells: dict[int, Cell]) -> None:
        # Odd places are the marks' JSON, even ones what was printed between them.
        pieces = self._mark.split(text)
        marks: list[dict[str, Any]] = [json.loads(mark) for mark in pieces[1::2]]
        number = 0
        for place, printed in enumerate(pieces[::2]):
            if place:
                number = self._take(marks[place - 1], cells)
            following = marks[place]["cell"] if place < len(marks) else number + 1
            self._print(printed.replace(self._token, ""), name, cells, number, following - 1)

    @staticmethod
    def _take(mark: dict[str, Any], cells: dict[int, Cell]) -> int:
        number: int = mark["cell"]
        if "end" in mark:
            return max(0, number - 1)  # what is printed at exit is the last cell's
        cell = cells.setdefault(number, Cell())
        if "display" in mark:
            cell.display.append(mark["display"])
        cell.result = mark.get("result", cell.result)
        cell.error = mark.get("error", cell.error)
        return number

    @staticmethod
    def _print(text: str, name: str, cells: dict[int, Cell], number: int, last: int) -> None:
        parts = [(text, number)]
        if last > number and (dropped := _DROPPED.search(text)):
            # Cells in between went with their marks: what follows is of the last of them.
            parts = [(text[: dropped.end()], number), (text[dropped.end() :], last)]
        for part, owner in parts:
            if part:
                cell = cells.setdefault(owner, Cell())
                setattr(cell, name, getattr(cell, name) + part)
