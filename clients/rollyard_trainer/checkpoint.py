"""Where a training run is, on disk: it goes on after an interruption as if there had been none."""

# pyright: basic, reportMissingImports=false

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollyard_trainer.monitors import CollapseGuard
from rollyard_trainer.policy import Policy


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    stage: int = 0
    step: int = 0
    """Of the stage, next to be made."""
    total: int = 0
    """Steps made, of all stages."""
    problems: list[int] = field(default_factory=list[int])
    """Those of the stage, by index."""
    deck: list[int] = field(default_factory=list[int])
    """Those of this pass that are still to be drawn."""
    began: bool = False
    """True when what comes before the stage's first step is done."""
    ended: str = ""
    """Why the run is over; empty: it is not."""


class Store:
    """The files of one run: ``last.pt``, ``best.pt``, ``metrics.jsonl``, ``final/``; meanwhile
    ``imitation.pt``."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._log = directory, directory / "metrics.jsonl"
        directory.mkdir(parents=True, exist_ok=True)

    def claim(self, settings: dict[str, Any]) -> None:
        """Note what is run here, or check that it is the same.

        Raises:
            ValueError: the directory has a run under other settings.
        """
        path, text = self.directory / "run.json", json.dumps(settings, indent=1, default=str)
        if path.exists() and path.read_text() != text:
            raise ValueError(
                f"{self.directory} has a run of another configuration or other files; choose "
                f"another --out, or remove it"
            )
        path.write_text(text)

    def save(
        self, progress: Progress, policy: Policy, optimizer: torch.optim.Optimizer,
        guard: CollapseGuard, rng: np.random.Generator,
    ) -> None:  # fmt: skip
        """Write ``last.pt``; whole or not at all."""
        self._write("last.pt", {
            "progress": asdict(progress), "model": policy.model.state_dict(),
            "optimizer": optimizer.state_dict(), "guard": asdict(guard),
            "logged_bytes": self._log.stat().st_size, "rng": rng.bit_generator.state,
            "chance": policy.engine.chance.get_state(),
        })  # fmt: skip

    def load(
        self, policy: Policy, optimizer: torch.optim.Optimizer, guard: CollapseGuard,
        rng: np.random.Generator,
    ) -> Progress:  # fmt: skip
        """Go back to ``last.pt``, or begin anew when there is none."""
        path = self.directory / "last.pt"
        if not path.exists():
            self._log.write_text("")
            return Progress()
        # On the CPU: states of generators are only taken from there; the rest is copied.
        row = torch.load(path, weights_only=True, map_location="cpu")
        policy.model.load_state_dict(row["model"])
        optimizer.load_state_dict(row["optimizer"])
        for name, value in row["guard"].items():
            setattr(guard, name, value)
        rng.bit_generator.state = row["rng"]
        policy.engine.chance.set_state(row["chance"])
        os.truncate(self._log, row["logged_bytes"])  # steps after it are made again
        return Progress(**row["progress"])

    def save_imitation(self, stage: int, state: dict[str, Any]) -> None:
        """Write ``imitation.pt``: how far what comes before a stage's first step is."""
        self._write("imitation.pt", {"stage": stage, **state})

    def load_imitation(self, stage: int) -> dict[str, Any] | None:
        """What was written last for this stage; None: nothing."""
        path = self.directory / "imitation.pt"
        if not path.exists():
            return None
        row = torch.load(path, weights_only=True, map_location="cpu")
        return row if row["stage"] == stage else None

    def drop_imitation(self) -> None:
        """The stage has begun, and has a checkpoint of its own."""
        (self.directory / "imitation.pt").unlink(missing_ok=True)

    def keep_best(self, policy: Policy) -> None:
        """Write the weights that a collapse goes back to."""
        self._write("best.pt", policy.model.state_dict())

    def back_to_best(self, policy: Policy) -> None:
        weights = torch.load(self.directory / "best.pt", weights_only=True, map_location="cpu")
        policy.model.load_state_dict(weights)

    def log(self, **row: Any) -> None:
        """Append a line to ``metrics.jsonl``; what is not a number is null."""
        known = {
            key: None if isinstance(value, float) and not np.isfinite(value) else value
            for key, value in row.items()
        }
        with self._log.open("a") as file:
            file.write(json.dumps(known) + "\n")

    def _write(self, name: str, value: Any) -> None:
        part = self.directory / f"{name}.part"
        torch.save(value, part)
        part.rename(self.directory / name)
