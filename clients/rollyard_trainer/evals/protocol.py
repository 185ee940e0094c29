"""What makes two results comparable, and the refusal to compare others."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from rollyard_trainer.evals.statistics import average_at_k, difference


class NotComparable(ValueError):
    """The results were measured under different protocols; the message names what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Everything but the model."""

    problems: str
    """Digest of the problem file's content."""
    template: str
    image: str
    """Of what the programs ran in; see :func:`rollyard_trainer.evals.run.image_of`."""
    tools: bool
    turns: int
    max_tokens: int
    temperature: float
    k: int
    timeout_s: float
    memory_bytes: int
    api: str

    def digest(self) -> str:
        """Short name; equal digests may be compared."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of a JSONL file: ``{"problem": …, "answer": …}``."""

    question: str
    answer: str


def read_problems(path: Path) -> tuple[list[Problem], str]:
    """The problems of a file, and the digest of its content.

    Raises:
        ValueError: a line is not as it must be; the message has its number.
    """
    text = path.read_text()
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
            problems.append(Problem(str(row["problem"]), str(row["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{path}:{number}: need "problem" and "answer": {error!r}') from None
    if not problems:
        raise ValueError(f"{path} has no problem")
    return problems, hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Result:
    """One model under one protocol."""

    model: str
    protocol: Protocol
    scores: list[list[float | None]]
    """One list of k per problem; None: the service or the verifier failed, counted nowhere."""
    details: dict[str, float]

    def array(self) -> np.ndarray:
        """(1, problems, k), NaN for None."""
        return np.array([self.scores], dtype=float)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({**asdict(self), "digest": self.protocol.digest()}, indent=1))

    @classmethod
    def read(cls, path: Path) -> "Result":
        row = cast("dict[str, Any]", json.loads(path.read_text()))
        protocol: dict[str, Any] = {
            "image": "",
            **row["protocol"],
        }  # results of before it was noted equal none
        return cls(row["model"], Protocol(**protocol), row["scores"], row["details"])


def table(results: Sequence[Result]) -> str:
    """Models side by side, differences from the first, 95% intervals beside every number.

    Raises:
        NotComparable: their protocols differ.
    """
    first = results[0]
    for other in results[1:]:
        ours, theirs = asdict(first.protocol), asdict(other.protocol)
        if wrong := [name for name in ours if ours[name] != theirs[name]]:
            told = ", ".join(f"{name} {ours[name]!r} and {theirs[name]!r}" for name in wrong)
            raise NotComparable(f"{first.model} and {other.model} differ in {told}")
    k, count = first.protocol.k, len(first.scores)
    lines = [f"protocol {first.protocol.digest()}: {count} problems, avg@{k}"]
    for result in results:
        line = f"{result.model:30} {average_at_k(result.array()):.3f}"
        if result is not first:
            line += f"   {difference(result.array(), first.array()):+.3f} against {first.model}"
        lines.append(line)
    return "\n".join(lines)
