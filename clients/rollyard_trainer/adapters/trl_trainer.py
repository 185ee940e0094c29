"""TRL's ``GRPOTrainer`` that sees only the rollouts that RoC selected.

As :mod:`rollyard_trainer.adapters.trl`, and rows that were left out go neither through forward and
backward nor into the loss's denominator, which is half of the update's cost:

    RocTrainer(reward_funcs=[RocReward(reward, num_generations=32)], …)

Checked with TRL 1.16.0, for whose batches of text it is; with images, use ``GRPOTrainer``.
"""

# pyright: basic, reportMissingImports=false

from typing import Any

import torch
from trl import GRPOTrainer

from rollyard_trainer.adapters.trl import RocReward


class RocTrainer(GRPOTrainer):
    """GRPOTrainer whose training batches lose the rows that its RocReward left out."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        (reward,) = (one for one in self.reward_funcs if isinstance(one, RocReward))
        rows, scored = self._rows(reward.chosen)
        kept = {
            key: value[rows]
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(reward.chosen)
            else value
            for key, value in output.items()
        }
        # What fills up is attended to, so that no row is empty, but has no loss and no tokens.
        mask = kept.get("tool_mask", torch.ones_like(kept["completion_mask"]))
        kept["tool_mask"] = mask * scored[:, None].to(mask)
        written = (kept["completion_mask"] * kept["tool_mask"]).sum()
        kept["num_items_in_batch"] = self.accelerator.gather(written).sum()
        return kept

    def _rows(self, chosen: list[float | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows to keep, and which of them count: TRL cuts the batch into equal parts, one per step
        of accumulation, and all processes must take as many steps.
        """
        device, parts = self.accelerator.device, self.args.steps_per_generation
        selected = [row for row, reward in enumerate(chosen) if reward is not None]
        others = [row for row, reward in enumerate(chosen) if reward is None]
        missing = max(parts - len(selected), -len(selected) % parts)
        rows = torch.tensor(selected + others[:missing], device=device)
        return rows, torch.arange(len(rows), device=device) < len(selected)
