"""Stages of training as TOML: the paper's three, and smaller ones; see ``configs/README.md``."""

import tomllib
from dataclasses import MISSING, dataclass, field, fields
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
    validate_every: int = 10
    """Steps between evaluations on the validation problems, and between checkpoints."""
    train: dict[str, Any] = field(default_factory=dict[str, Any])
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    env: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of ``env.PythonToolEnv``, such as ``max_chars``."""
    guard: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of ``monitors.CollapseGuard``: the rule for stopping, fixed before the run."""
    sft: dict[str, Any] = field(default_factory=dict[str, Any])
    """``steps``, ``rows``, ``rate`` of imitation before the stage; empty: none."""
    tiny: dict[str, Any] = field(default_factory=dict[str, Any])
    """Size of the model named "tiny": arguments of ``engines.tiny.Shape``."""

    def rate_at(self, step: int) -> float:
        """Learning rate: linear warm-up, then constant."""
        return (
            self.rate * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.rate
        )


def read(name_or_path: str | Path) -> list[Stage]:
    """Read a configuration that comes with the package, by name, or a file.

    It is one stage, or several as ``[[stage]]`` tables, for which the rest are defaults.

    Raises:
        ValueError: a name is unknown or a value is missing; the message says which.
    """
    if str(name_or_path) in NAMES:
        own = resources.files("rollyard_trainer") / "configs" / f"{name_or_path}.toml"
        row = tomllib.loads(own.read_text())
    else:
        try:
            row = tomllib.loads(Path(name_or_path).read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{name_or_path}: {error}") from None
    tables: list[dict[str, Any]] = row.pop("stage", [{}])
    return [_stage(str(name_or_path), row, table) for table in tables]


def _stage(name: str, shared: dict[str, Any], own: dict[str, Any]) -> Stage:
    row = {**shared, **own}
    for key in shared.keys() & own.keys():
        if isinstance(shared[key], dict):
            row[key] = {**shared[key], **own[key]}
    known = {one.name: one for one in fields(Stage)}
    if unknown := sorted(row.keys() - known.keys()):
        raise ValueError(f"{name}: unknown {', '.join(unknown)}; known: {sorted(known)}")
    needed = {key for key, one in known.items() if one.default is one.default_factory is MISSING}
    if missing := sorted(needed - row.keys()):
        raise ValueError(f"{name}: {', '.join(missing)} missing")
    return Stage(**row)
