"""One training step of TRL's own GRPOTrainer with our rollout function, on a tiny model.

The model's weights are real and trained; what it says is scripted, for a model this small says
nothing of sense: a call, then a malformed one, then the answer.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from rollyard.integrations.python_tool import AsyncPythonTool
from rollyard.integrations.trl_rollout import ToolRollout, unless_faulted

pytestmark = pytest.mark.filterwarnings("default")  # the frameworks' own

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SAMPLES = 16
PAUSE_S = 1.0
CODE = f"import time; time.sleep({PAUSE_S}); print(6 * 7)"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    made.chat_template = TEMPLATE
    return made


def scripted(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Replace what the model says; what it learns from is untouched."""
    first = {"name": "python", "arguments": {"code": CODE}}
    says = [f"<tool_call>{json.dumps(first)}</tool_call>", "<tool_call>{broken", "It is 42."]

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        turns = []
        for row in input_ids.tolist():
            text = tokenizer.decode([one for one in row if one != tokenizer.pad_token_id])
            said = says[text.count("<|im_start|>tool")]
            turns.append([*tokenizer.encode(said), tokenizer.eos_token_id])
        width = max(map(len, turns))
        pad = [tokenizer.pad_token_id]
        added = torch.tensor([one + pad * (width - len(one)) for one in turns])
        return torch.cat([input_ids, added], 1)

    model.generate = generate  # type: ignore[assignment]


def train(
    tool: AsyncPythonTool, tokenizer: PreTrainedTokenizerFast, folder: Path, monkeypatch: Any
) -> tuple[dict[str, Any], float, bool]:
    """One step; the rollout's output, its seconds, and whether the weights moved."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                    num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=4096)
    )  # fmt: skip
    scripted(model, tokenizer)
    seen: dict[str, Any] = {}

    class Watched(ToolRollout):
        def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
            begun = time.perf_counter()
            output = super().__call__(prompts, trainer)
            seen.update(output, took_s=time.perf_counter() - begun)
            return output

    @unless_faulted
    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        return [float(i) for i, _ in enumerate(completions)]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward],
        args=GRPOConfig(
            output_dir=str(folder), per_device_train_batch_size=SAMPLES, num_generations=SAMPLES,
            max_completion_length=1500, max_steps=1, report_to=[], use_cpu=True, bf16=False,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"What is 6 * 7? ({i})"}]} for i in range(2)]
        ),
        processing_class=tokenizer,
        rollout_func=Watched(tool, on_fault="mask"),
    )  # fmt: skip
    before = [one.clone() for one in model.parameters()]
    trainer.train()
    pairs = zip(before, model.parameters(), strict=True)
    return seen, seen["took_s"], any(not torch.equal(old, new) for old, new in pairs)


def test_all_samples_calls_run_at_once(
    url: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, took_s, moved = train(AsyncPythonTool(url), tokenizer, tmp_path, monkeypatch)
    assert moved
    assert output["tool_calls"] == [2] * SAMPLES
    assert output["service_fault"] == [False] * SAMPLES
    for ids, mask in zip(output["completion_ids"], output["env_mask"], strict=True):
        models = tokenizer.decode(
            [one for one, is_models in zip(ids, mask, strict=True) if is_models]
        )
        tools = tokenizer.decode(
            [one for one, is_models in zip(ids, mask, strict=True) if not is_models]
        )
        assert models.endswith("{broken<|im_end|>It is 42.<|im_end|>")
        assert tools.count("<|im_start|>tool") == 2
        assert "\n42<|im_end|>" in tools
        assert "[invalid call: the arguments are not JSON" in tools
    # One after another they would sleep for 16 s: no margin of speed, but of order.
    assert took_s < SAMPLES * PAUSE_S / 2


def test_what_the_service_could_not_run_is_not_learned_from(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = AsyncPythonTool("http://127.0.0.1:9", max_retries=0)
    output, _, moved = train(nowhere, tokenizer, tmp_path, monkeypatch)
    assert output["service_fault"] == [True] * SAMPLES
    assert not any(map(any, output["env_mask"]))
    assert not moved
