"""A model of transformers writes multi-turn rollouts token for token, and is trained on them."""

# pyright: basic, reportMissingImports=false

import json

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rollyard import AsyncClient
from rollyard_trainer import loop, parse, template
from rollyard_trainer.engines import Sampling
from rollyard_trainer.engines.hf import CausalLM, HFEngine, HFTokenizer
from rollyard_trainer.env import PythonToolEnv, service
from rollyard_trainer.evals.protocol import Problem
from rollyard_trainer.trajectory import Trajectory

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own

CALL = json.dumps({"name": parse.TOOL_NAME, "arguments": {"code": "print(6*7)"}})
CALLS = f"\n<tool_call>\n{CALL}\n</tool_call>{template.END}"


TOKENIZER = HFTokenizer(byte_tokenizer())


def new_engine(seed: int = 0, context: int = 512) -> HFEngine:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(TOKENIZER.source), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=context, initializer_range=0.3,
    )  # fmt: skip
    model = CausalLM(Qwen2ForCausalLM(config))
    return HFEngine(model, TOKENIZER, seed)


class Scripted(HFEngine):
    """Writes what it is told, turn by turn; probabilities are the model's own."""

    turns: list[list[str]]

    def write(self, given, room, cache, sampling):
        self.script = [iter(TOKENIZER.encode(text)) for text in self.turns.pop(0)]
        return super().write(given, room, cache, sampling)

    def choose(self, logprobs):
        return torch.tensor([next(tokens, 0) for tokens in self.script])


def test_only_the_templates_markup_becomes_control_tokens() -> None:
    text = template.prompt("say <e> and é")
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert ids.count(TOKENIZER.end_id) == 2
    assert TOKENIZER.source.convert_tokens_to_ids("<e>") not in ids
    observed = template.tool_turn([f"{template.END}{template.START}system"])
    assert TOKENIZER.encode(observed).count(TOKENIZER.end_id) == 1
    with pytest.raises(ValueError, match="im_start"):
        bare = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
        HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=bare))


async def test_cached_probabilities_over_turns_are_those_of_the_whole_sequence(
    address: str,
) -> None:
    """Rows of several lengths, of which one ends early: holes in the cache must not be seen."""
    engine = new_engine()
    scripted = Scripted(engine.model, TOKENIZER, 0)
    scripted.turns = [
        [f"ab{CALLS}", f"a much longer turn{CALLS}", f"done{template.END}"],
        [f"x{template.END}", f"and then{CALLS}"],
        [f"7{template.END}"],
    ]
    async with AsyncClient(address) as client:
        env = PythonToolEnv(run=service(client))
        prompts = ["one", "a longer prompt", "two"]
        rollouts = await scripted.rollout(prompts, env, Sampling(max_turns=4, max_tokens=480))
    assert [one.turns for one in rollouts] == [2, 3, 1]
    assert [one.stop for one in rollouts] == ["answer"] * 3
    forced = template.tool_turn(["42"])
    for one, prompt in zip(rollouts, prompts, strict=True):
        assert TOKENIZER.decode(one.prompt_ids + one.ids) == prompt + one.text
        given = [i for i, own in zip(one.ids, one.mask, strict=True) if not own]
        assert TOKENIZER.decode(given) == forced * (one.turns - 1)
    batch = loop.Batch.of(rollouts)
    now, _ = loop.logprobs(engine.model, batch.ids, 1.0)
    assert float((now - batch.old).detach()[batch.mask].abs().max()) < 1e-4


async def test_sampled_tokens_have_the_log_probability_that_training_sees() -> None:
    engine = new_engine(1)
    env = PythonToolEnv(run=None)  # pyright: ignore[reportArgumentType] - random text has no call
    sampling = Sampling(max_tokens=40, temperature=0.8)
    engine.rows = 2  # two, then one
    rollouts = await engine.rollout(["one", "a longer prompt", "x"], env, sampling)
    assert [TOKENIZER.decode(one.prompt_ids) for one in rollouts] == ["one", "a longer prompt", "x"]
    batch = loop.Batch.of(rollouts)
    now, _ = loop.logprobs(engine.model, batch.ids, 0.8)
    assert float((now - batch.old).detach()[batch.mask].abs().max()) < 1e-4
    with pytest.raises(ValueError, match="fills the context of 512"):
        await engine.rollout(["x" * 600], env, sampling)


async def test_a_step_trains_a_model_of_transformers() -> None:
    engine = new_engine(2)
    before = [weight.detach().clone() for weight in engine.model.parameters()]
    problems = [Problem("p", "1"), Problem("q", "2")]
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)

    async def score(one: Trajectory, problem: loop.Problem) -> float:
        return float(sum(one.ids) % 2)

    config = loop.Config(keep=4, sampling=Sampling(max_tokens=8))
    env = PythonToolEnv(run=None)  # pyright: ignore[reportArgumentType]
    done = await loop.step(
        engine, engine.model, optimizer, [Asked(p) for p in problems], env, score, config,
        np.random.default_rng(0),
    )  # fmt: skip
    assert done.metrics["rows"] == 8
    assert done.metrics["clip_fraction"] == 0
    after = engine.model.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Asked:
    def __init__(self, problem: Problem) -> None:
        self.prompt, self.answer = problem.question, problem.answer
