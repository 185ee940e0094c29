"""Stages of training as TOML: the paper's three, and smaller ones; see ``configs/README.md``."""

import tomllib
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

NAMES = ("stage1", "stage2", "stage3", "gpu1", "laptop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. ``train`` and ``sampling`` are arguments of ``loop.Config`` and ``Sampling``."""

    untested: bool
    """True: never run by the authors of this package."""
    model: str
    steps: int
    prompts: int
    rate: float
    warmup_steps: int
    reset_optimizer: bool
    drop_always_solved: int
    """Before the stage, drop problems that the policy solves in all of so many samples; 0: none."""
    train: dict[str, Any] = field(default_factory=dict[str, Any])
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])

    def rate_at(self, step: int) -> float:
        """Learning rate: linear warm-up, then constant."""
        return (
            self.rate * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.rate
        )


def read(name_or_path: str | Path) -> Stage:
    """Read a stage that comes with the package, by name, or a file.

    Raises:
        ValueError: a name is unknown or a value is missing; the message says which.
    """
    if str(name_or_path) in NAMES:
        own = resources.files("rollyard_trainer") / "configs" / f"{name_or_path}.toml"
        row = tomllib.loads(own.read_text())
    else:
        row = tomllib.loads(Path(name_or_path).read_text())
    known = {one.name for one in fields(Stage)}
    if unknown := sorted(row.keys() - known):
        raise ValueError(f"{name_or_path}: unknown {', '.join(unknown)}; known: {sorted(known)}")
    if missing := sorted(known - row.keys() - {"train", "sampling"}):
        raise ValueError(f"{name_or_path}: {', '.join(missing)} missing")
    return Stage(**row)


def still_hard(scores: dict[str, list[float | None]], samples: int) -> list[str]:
    """Problems to keep for the next stage: those not solved in all of ``samples`` (paper §4.3).

    Args:
        scores: Problem to its rewards; None counts as neither.

    Raises:
        ValueError: a problem has fewer scores than ``samples``.
    """
    for problem, got in scores.items():
        if len(got) < samples:
            raise ValueError(f"{problem}: {len(got)} scores, {samples} needed")
    return [name for name, got in scores.items() if any(one != 1 for one in got[:samples])]
