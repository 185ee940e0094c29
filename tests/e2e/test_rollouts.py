"""Rollout functions for TRL and slime, against a real service and stand-ins for the trainers.

TRL's own trainer runs ``trl_rollout`` in tests/frameworks; slime cannot be installed here.
"""

import asyncio
import dataclasses
import enum
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from letters import EOS, Letters, call

from rollyard.integrations.observation import ServiceFault
from rollyard.integrations.python_tool import AsyncPythonTool
from rollyard.integrations.tool_calls import find_calls
from rollyard.integrations.trl_rollout import ToolRollout, unless_faulted

from .conftest import Service

NOWHERE = "http://127.0.0.1:9"
Says = Callable[[str], str]
"""What the model says after a text."""


def once(code: str) -> Says:
    """Calls the tool, and then says what it answered."""

    def says(text: str) -> str:
        _, answered, rest = text.rpartition("<tool>")
        return f"It is {rest.partition(EOS)[0]}." if answered else call(code)

    return says


# Calls ------------------------------------------------------------------------------------------


def test_calls_are_found() -> None:
    first, second = find_calls(call("print(1)") + call("2", name="other"))
    assert first["function"] == {"name": "python", "arguments": {"code": "print(1)"}}
    assert second["function"]["name"] == "other"
    assert find_calls("no call") == []


@pytest.mark.parametrize("written", ["{broken", "[1]", '{"name": "python"}', '{"arguments": {}}'])
async def test_malformed_calls_are_answered(service: Service, written: str) -> None:
    from rollyard.integrations.openai_tools import answer_tool_calls

    calls = find_calls(f"<tool_call>{written}")
    assert len(calls) == 1
    tool = AsyncPythonTool(service.address)
    [answer] = await answer_tool_calls(tool, {"tool_calls": calls})
    assert answer["content"].startswith("[invalid call: ")
    await tool.aclose()


# TRL --------------------------------------------------------------------------------------------


class Trainer:
    """What ToolRollout uses of GRPOTrainer."""

    chat_template = None
    chat_template_kwargs: dict[str, Any] = {}  # noqa: RUF012 - as there

    def __init__(self, says: Says, *, room: int = 1000, logprobs: bool = False) -> None:
        self.processing_class = self._tokenizer = Letters()
        self.max_completion_length = room
        self._says = says
        self._logprobs = logprobs
        self.batches: list[int] = []

    def _generate_single_turn(self, ids: list[list[int]], *_: Any) -> tuple[Any, Any]:
        self.batches.append(len(ids))
        turns = [
            [ord(one) for one in self._says(self._tokenizer.decode(context)) + EOS]
            for context in ids
        ]
        return turns, [[-0.5] * len(one) for one in turns] if self._logprobs else None

    def _get_tool_suffix_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        text = "".join(f"\n<tool>{one['content']}{EOS}" for one in messages)
        return [ord(one) for one in f"{text}\n<assistant>"]


def prompts(count: int) -> list[Any]:
    return [[{"role": "user", "content": f"question {i}"}] for i in range(count)]


def parts(output: dict[str, Any], number: int = 0) -> tuple[str, str]:
    """The model's text and the tools' of one sample."""
    pairs = list(zip(output["completion_ids"][number], output["env_mask"][number], strict=True))
    said = (chr(one) for one, is_models in pairs if is_models)
    told = (chr(one) for one, is_models in pairs if not is_models)
    return "".join(said), "".join(told)


def test_trl_rollout(service: Service) -> None:
    trainer = Trainer(once("print(6 * 7)"), logprobs=True)
    output = ToolRollout(AsyncPythonTool(service.address))(prompts(5), trainer)
    assert trainer.batches == [5, 5]
    assert output["tool_calls"] == [1] * 5
    assert "tools ['python']" in "".join(map(chr, output["prompt_ids"][0]))
    said, told = parts(output, 4)
    assert said == f"{call('print(6 * 7)')}{EOS}It is 42.{EOS}"
    assert told == f"\n<tool>42{EOS}\n<assistant>"
    for ids, mask, logprobs in zip(
        output["completion_ids"], output["env_mask"], output["logprobs"], strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs)
        assert [one == -0.5 for one in logprobs] == [one == 1 for one in mask]


def test_trl_rollout_in_a_running_loop(service: Service) -> None:
    """As in a notebook of Jupyter's."""

    async def scenario() -> dict[str, Any]:
        rollout = ToolRollout(AsyncPythonTool(service.address))
        return rollout(prompts(1), Trainer(once("1")))

    assert asyncio.run(scenario())["logprobs"] is None


def test_trl_rollout_ends_after_its_turns(service: Service) -> None:
    trainer = Trainer(lambda _: call("print(1)"))
    output = ToolRollout(AsyncPythonTool(service.address), max_turns=2)(prompts(1), trainer)
    assert (trainer.batches, output["tool_calls"]) == ([1, 1, 1], [2])


@pytest.mark.parametrize("room", [20, 70, 90])
def test_trl_rollout_never_passes_its_length(service: Service, room: int) -> None:
    trainer = Trainer(once("print('long' * 20)"), room=room)
    output = ToolRollout(AsyncPythonTool(service.address))(prompts(2), trainer)
    assert all(0 < len(ids) <= room for ids in output["completion_ids"])


def test_trl_fault_ends_training_or_masks_the_sample() -> None:
    tool = AsyncPythonTool(NOWHERE, max_retries=0)
    with pytest.raises(ServiceFault):
        ToolRollout(tool)(prompts(1), Trainer(once("1")))
    output = ToolRollout(tool, on_fault="mask")(prompts(2), Trainer(once("1")))
    assert output["service_fault"] == [True, True]
    assert parts(output)[0] == ""

    def reward(**_: Any) -> list[float | None]:
        return [1.0, 0.5]

    rewards = unless_faulted(reward)
    assert rewards(service_fault=[True, False]) == [None, 0.5]
    assert rewards() == [1.0, 0.5]


# slime ------------------------------------------------------------------------------------------


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand-ins for the three things that slime.py imports; ``says`` is the model."""
    stage = types.SimpleNamespace(says=once("print(6 * 7)"), reason="stop", asked=[])

    class Status(enum.Enum):
        PENDING, COMPLETED, TRUNCATED, ABORTED = "pending", "completed", "truncated", "aborted"

    @dataclasses.dataclass
    class Sample:
        prompt: Any
        tokens: list[int] = dataclasses.field(default_factory=list[int])
        response: str = ""
        response_length: int = 0
        loss_mask: list[int] | None = None
        rollout_log_probs: list[float] | None = None
        status: Status = Status.PENDING
        remove_sample: bool = False

    Sample.Status = Status  # type: ignore[attr-defined]

    async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
        stage.asked.append((url, payload))
        said = stage.says("".join(map(chr, payload["input_ids"]))) + EOS
        said = said[: payload["sampling_params"]["max_new_tokens"]]
        reason = stage.reason if said.endswith(EOS) else "length"
        logprobs = [(-0.5, ord(one), None) for one in said]
        return {
            "text": said,
            "meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": logprobs},
        }

    def state(_: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(tokenizer=Letters())

    names: dict[str, dict[str, Any]] = {
        "slime.rollout.sglang_rollout": {"GenerateState": state},
        "slime.utils.http_utils": {"post": post},
        "slime.utils.types": {"Sample": Sample},
    }
    for name, content in names.items():
        top, middle, _ = name.split(".")
        for package in (top, f"{top}.{middle}"):
            monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rollyard.integrations.slime", raising=False)
    stage.Sample = Sample
    return stage


def slime_sample(
    stage: types.SimpleNamespace, address: str, *, longest: int = 1000, max_turns: int = 8,
    prompt: Any = None,
) -> Any:  # fmt: skip
    from rollyard.integrations.slime import ToolGenerate

    args = types.SimpleNamespace(
        sglang_router_ip="router", sglang_router_port=1, rollout_max_context_len=longest,
        context_parallel_size=1, max_tokens_per_gpu=longest,
    )  # fmt: skip
    sample = stage.Sample(prompt or [{"role": "user", "content": "question"}])

    async def scenario() -> Any:
        tool = AsyncPythonTool(address, max_retries=0 if address == NOWHERE else 5)
        generate = ToolGenerate(tool, max_turns=max_turns)
        try:
            return await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 500})
        finally:
            await tool.aclose()

    return asyncio.run(scenario())


def test_slime_generate(slime: types.SimpleNamespace, service: Service) -> None:
    sample = slime_sample(slime, service.address)
    assert sample.status is slime.Sample.Status.COMPLETED
    told = f"\n<tool>42{EOS}\n<assistant>"
    assert sample.response == f"{call('print(6 * 7)')}{EOS}{told}It is 42.{EOS}"
    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
    masked = [chr(one) for one, bit in zip(sample.tokens[-sample.response_length :],
                                           sample.loss_mask, strict=True) if not bit]  # fmt: skip
    assert "".join(masked) == told
    (url, first), (_, second) = slime.asked
    assert url == "http://router:1/generate"
    assert second["input_ids"] == sample.tokens[: len(second["input_ids"])]
    assert first["sampling_params"]["temperature"] == 1.0


def test_slime_text_prompts_are_taken_as_they_are(
    slime: types.SimpleNamespace, service: Service
) -> None:
    sample = slime_sample(slime, service.address, prompt="a text")
    assert "".join(map(chr, sample.tokens)).startswith("a textI compute")


@pytest.mark.parametrize("longest", [30, 110, 150, 180])
def test_slime_sample_never_passes_its_length(
    slime: types.SimpleNamespace, service: Service, longest: int
) -> None:
    slime.says = once("print('long' * 50)")
    sample = slime_sample(slime, service.address, longest=longest)
    assert len(sample.tokens) <= longest or sample.response_length == 0
    assert sample.status is slime.Sample.Status.TRUNCATED


def test_slime_aborted(slime: types.SimpleNamespace, service: Service) -> None:
    slime.reason = "abort"
    assert slime_sample(slime, service.address).status is slime.Sample.Status.ABORTED


def test_slime_ends_after_its_turns(slime: types.SimpleNamespace, service: Service) -> None:
    slime.says = lambda _: call("1")  # type: ignore[assignment]
    sample = slime_sample(slime, service.address, max_turns=1)
    assert len(slime.asked) == 2
    assert sample.status is slime.Sample.Status.TRUNCATED


def test_slime_fault_is_nothing_to_learn_from(slime: types.SimpleNamespace) -> None:
    sample = slime_sample(slime, NOWHERE)
    assert (sample.status, sample.remove_sample) == (slime.Sample.Status.ABORTED, True)
    assert sample.loss_mask
    assert not any(sample.loss_mask)
