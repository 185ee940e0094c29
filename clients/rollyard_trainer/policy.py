"""What is trained, by name: ``tiny``, made here, or a model of transformers."""

# pyright: basic, reportMissingImports=false

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rollyard_trainer.engines.lockstep import LockStepEngine
from rollyard_trainer.engines.pieces import Pieces, pieces_of
from rollyard_trainer.engines.tiny import Shape, TinyEngine, TinyGPT
from rollyard_trainer.recipe import Stage


@dataclass(slots=True)
class Policy:
    """A model and the engine that writes rollouts with its present weights."""

    model: nn.Module
    engine: LockStepEngine

    def write(self, directory: Path) -> None:
        """Save the model for use: as transformers does, or weights, shape and pieces of a tiny."""
        directory.mkdir(parents=True, exist_ok=True)
        if isinstance(self.model, TinyGPT):
            torch.save(self.model.state_dict(), directory / "weights.pt")
            return
        from rollyard_trainer.engines.hf import HFTokenizer

        self.model.inner.save_pretrained(directory)
        assert isinstance(self.engine.tokenizer, HFTokenizer)
        self.engine.tokenizer.source.save_pretrained(directory)


def new(stage: Stage, texts: Sequence[str], out: Path, seed: int) -> Policy:
    """The policy at the start of the first stage.

    Args:
        texts: What a tiny model's tokenizer is made of, once; it is then read from ``out``.

    Raises:
        ImportError: transformers is not installed.
        OSError: there is no such model.
        ValueError: its tokenizer cannot be used.
    """
    torch.manual_seed(seed)
    if stage.model != "tiny":
        from rollyard_trainer.engines import hf

        return Policy(*hf.load(stage.model, seed))
    torch.set_num_threads(1)  # it gains nothing from a second thread
    path = out / "pieces.json"
    if not path.exists():
        path.write_text(json.dumps(pieces_of(texts).pieces))
    pieces = Pieces(json.loads(path.read_text()))
    model = TinyGPT(Shape(vocabulary=len(pieces), **stage.tiny))
    return Policy(model, TinyEngine(model, pieces, seed))
