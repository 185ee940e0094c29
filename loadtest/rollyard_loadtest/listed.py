"""Programs of a JSON Lines file: a user's own, or those of a benchmark such as HumanEval.

A line is an object with ``code`` and, as far as wanted, ``stdin``, ``outcome`` (default ok),
``stdout``, ``limits``, ``kind`` and ``nominal_s``. A line with ``prompt``, ``canonical_solution``,
``test`` and ``entry_point`` is a HumanEval problem: its own solution must pass its own tests.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollyard.types import Limits, Outcome
from rollyard_loadtest.workload import Work


class ListError(ValueError):
    """A file of programs that cannot be used; the message names the line."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    code: str
    stdin: str | None = None
    outcome: Outcome = "ok"
    stdout: str | None = None
    limits: dict[str, Any] = Field(default_factory=dict[str, Any])
    kind: str = "listed"
    nominal_s: Annotated[float, Field(ge=0)] = 0.0


def read_works(path: Path) -> list[Work]:
    """Read all programs of a file; ``.gz`` is unpacked.

    Raises:
        ListError: it is not there, empty, or a line is malformed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ListError(f"{path}: {error.strerror}") from None
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    found = list(_works(text, path))
    if not found:
        raise ListError(f"{path}: no program in it; each line is one JSON object with `code`")
    return found


def _works(text: str, path: Path) -> Iterator[Work]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields: object = json.loads(line)
        except ValueError as error:
            raise ListError(f"{where}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ListError(f"{where}: not a JSON object")
        yield _work(cast("dict[str, Any]", fields), where)


def _work(fields: dict[str, Any], where: str) -> Work:
    if "canonical_solution" in fields:
        return _human_eval(fields, where)
    try:
        line = _Line.model_validate(fields)
        Limits.model_validate(line.limits)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ListError(f"{where}: {place}: {problem['msg']}") from None
    return Work(line.kind, line.code, line.outcome, line.stdout, line.stdin, line.limits,
                nominal_s=line.nominal_s)  # fmt: skip


def _human_eval(fields: dict[str, Any], where: str) -> Work:
    try:
        code = (
            f"{fields['prompt']}{fields['canonical_solution']}\n{fields['test']}\n"
            f"check({fields['entry_point']})\n"
        )
    except KeyError as error:
        raise ListError(f"{where}: a HumanEval problem without {error}") from None
    return Work("humaneval", code, nominal_s=0.01)
