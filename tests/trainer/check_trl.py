"""RoC inside TRL's own GRPOTrainer; run by `scripts/setup-trainer --trl`."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from rollyard_trainer.adapters.trl import PythonEnvironment, RocReward
from rollyard_trainer.objective import advantages
from rollyard_trainer.roc import ToolCall

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own
GROUP = 8


def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<e>", pad_token="<p>")


def test_trl_trains_on_what_was_selected_and_on_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    environments = [PythonEnvironment() for _ in range(2 * GROUP)]
    for row, one in enumerate(environments):
        one._calls = [ToolCall("exec_error" if row % 4 == 3 else "ok")]
    said: list[list[float | None]] = []

    def correct(completions: list[Any], **_: Any) -> list[float | None]:
        return [float(row % 2) for row, _ in enumerate(completions)]

    roc_reward = RocReward(correct, num_generations=GROUP)

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        columns["environments"] = environments
        said.append(roc_reward(prompts=prompts, completions=completions, **columns))
        return said[-1]

    text, vocabulary = tokenizer(), tokenizer().vocab_size + 2
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, hidden_size=32, intermediate_size=64,
                    num_hidden_layers=1, num_attention_heads=2)
    )  # fmt: skip
    seen: list[dict[str, torch.Tensor]] = []

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            seen.append(super()._generate_and_score_completions(inputs))
            return seen[-1]

    before = [weight.clone() for weight in model.parameters()]
    Watched(
        model=model,
        reward_funcs=[reward],
        args=GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=2 * GROUP, max_steps=1,
            num_generations=GROUP, max_completion_length=16, report_to=[], use_cpu=True,
            bf16=False, save_strategy="no", loss_type="dapo", beta=0.0, epsilon=0.2,
            epsilon_high=0.28,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(4)]),
        processing_class=text,
    ).train()  # fmt: skip
    (rewards,), found = said, seen[0]["advantages"]
    assert sum(one is not None for one in rewards) == GROUP
    for start in (0, GROUP):
        rows = range(start, start + GROUP)
        kept = [row for row in rows if rewards[row] is not None]
        # TRL's epsilon is 1e-4, ours 1e-6.
        ours = torch.tensor(advantages([float(rewards[row] or 0) for row in kept]))
        assert torch.allclose(found[kept].double(), ours, atol=1e-3)
        assert all(found[row] == 0 for row in rows if row not in kept)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
