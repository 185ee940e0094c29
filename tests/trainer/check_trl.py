"""RoC inside TRL's own GRPOTrainer; run by `scripts/setup-trainer --trl`."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rollyard_trainer.adapters.trl import PythonEnvironment, RocReward
from rollyard_trainer.adapters.trl_trainer import RocTrainer
from rollyard_trainer.objective import advantages
from rollyard_trainer.roc import ToolCall

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own
GROUP = 8


def trained(
    kind: type[GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int = 1
) -> tuple[list[float | None], dict[str, torch.Tensor], list[torch.Tensor], list[int]]:
    """One step: rewards, TRL's batch, weights afterwards, and rows of each forward pass."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.manual_seed(0)
    environments = [PythonEnvironment() for _ in range(2 * GROUP)]
    for row, one in enumerate(environments):
        one._calls = [ToolCall("exec_error" if row % 4 == 3 else "ok")]

    def correct(completions: list[Any], **_: Any) -> list[float | None]:
        return [float(row % 2) for row, _ in enumerate(completions)]

    class Reward(RocReward):
        def __call__(self, **columns: Any) -> list[float | None]:
            return super().__call__(**{**columns, "environments": environments})

    reward = Reward(correct, num_generations=GROUP)
    text = byte_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(text), hidden_size=32, intermediate_size=64,
                    num_hidden_layers=1, num_attention_heads=2)
    )  # fmt: skip
    seen: list[dict[str, torch.Tensor]] = []
    passes: list[int] = []

    class Watched(kind):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            seen.append(super()._generate_and_score_completions(inputs))
            return seen[-1]

        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            passes.append(len(inputs["completion_ids"]))
            return super().compute_loss(model, inputs, *rest, **named)

    before = [weight.detach().clone() for weight in model.parameters()]
    Watched(
        model=model,
        reward_funcs=[reward],
        args=GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=2 * GROUP // parts, max_steps=1,
            gradient_accumulation_steps=parts, num_generations=GROUP, max_completion_length=16,
            report_to=[], use_cpu=True, bf16=False, save_strategy="no", loss_type="dapo", beta=0.0,
            epsilon=0.2, epsilon_high=0.28, seed=1,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(4)]),
        processing_class=text,
    ).train()  # fmt: skip
    after = [weight.detach() for weight in model.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return reward.chosen, seen[0], after, passes


def test_trl_trains_on_what_was_selected_and_on_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards, batch, _, passes = trained(GRPOTrainer, tmp_path, monkeypatch)
    found = batch["advantages"]
    assert passes == [2 * GROUP]
    assert sum(one is not None for one in rewards) == GROUP
    for start in (0, GROUP):
        rows = range(start, start + GROUP)
        kept = [row for row in rows if rewards[row] is not None]
        # TRL's epsilon is 1e-4, ours 1e-6.
        ours = torch.tensor(advantages([float(rewards[row] or 0) for row in kept]))
        assert torch.allclose(found[kept].double(), ours, atol=1e-3)
        assert all(found[row] == 0 for row in rows if row not in kept)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_subclass_passes_only_what_was_selected_and_counts_only_its_tokens(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards, batch, _, passes = trained(RocTrainer, tmp_path, monkeypatch, parts)
    assert passes == [GROUP // parts] * parts
    assert sum(one is not None for one in rewards) == len(batch["advantages"]) == GROUP
    assert (batch["advantages"] != 0).all()
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()


def test_what_fills_up_a_part_has_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(RocTrainer):
        def _rows(self, chosen: list[float | None]) -> Any:
            first = [one if row < 3 else None for row, one in enumerate(chosen)]
            first[:3] = [1.0, 0.0, 1.0]
            return super()._rows(first)

    _, batch, _, passes = trained(Short, tmp_path, monkeypatch, 2)
    assert passes == [2, 2]
    assert batch["tool_mask"].sum(1).gt(0).tolist() == [True, True, True, False]
    counted = batch["completion_mask"] * batch["tool_mask"]
    assert batch["num_items_in_batch"] == counted.sum() > 0
