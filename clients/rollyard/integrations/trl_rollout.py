"""TRL: a ``rollout_func`` that runs the tool calls of all samples at once.

    rollout = ToolRollout(AsyncPythonTool("http://gateway:8000"), max_turns=8)
    GRPOTrainer(…, rollout_func=rollout, reward_funcs=[unless_faulted(reward)])

TRL's own loop waits for each sample's calls before it starts the next one's, so a turn takes the
sum of all calls; here it takes the longest. Give the trainer no ``tools``, or both loops would run.
It uses GRPOTrainer's own generation and chat template (tested with TRL 1.16), so ``use_vllm`` and
the rest mean what they do without it. Images are not supported.
"""

# pyright: reportMissingImports=false

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from rollyard.integrations.observation import ServiceFault
from rollyard.integrations.openai_tools import answer_tool_calls
from rollyard.integrations.python_tool import SCHEMA, AsyncPythonTool
from rollyard.integrations.tool_calls import find_calls

T = TypeVar("T")
Calls = list[dict[str, Any]]
FAULT = "service_fault"
"""Field of the rollout's output: True for a sample whose call the service could not run."""


class _Sample:
    """One rollout. All lists but the prompt's are of the completion's length."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.is_models: list[int] = []
        """1 for a token of the model's, 0 for one of a tool's answer."""
        self.logprobs: list[float] = []
        self.calls: Calls = []
        """Of the last turn, unanswered; empty: the sample has ended."""
        self.count = 0
        self.faulted = False

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None, *, is_models: bool) -> None:
        self.ids += ids
        self.is_models += [int(is_models)] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


class ToolRollout:
    """A ``rollout_func`` for ``GRPOTrainer``.

    Args:
        tool: Whose ``python`` the model calls; it is told of by the chat template.
        max_turns: Turns with calls that are answered; then one last turn of the model.
        find: The calls in one turn's text.
        on_fault: The service could not run a call, after all retries. ``raise`` ends training with
            ServiceFault. ``mask`` ends the sample: none of its tokens is trained on, and the
            reward functions get ``service_fault=[…]``; wrap them in :func:`unless_faulted`.
    """

    def __init__(
        self,
        tool: AsyncPythonTool,
        *,
        max_turns: int = 8,
        find: Callable[[str], Calls] = find_calls,
        on_fault: Literal["raise", "mask"] = "raise",
    ) -> None:
        self._tool = tool
        self._max_turns = max_turns
        self._find = find
        self._mask = on_fault == "mask"

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Roll out each prompt once; TRL has repeated them ``num_generations`` times.

        Raises:
            ServiceFault: unless ``on_fault`` is ``mask``.
        """
        samples = [_Sample(ids) for ids in _tokenized(prompts, trainer)]
        has_logprobs = run_in_loop(self._roll(samples, trainer))
        return {
            "prompt_ids": [one.prompt_ids for one in samples],
            "completion_ids": [one.ids for one in samples],
            "logprobs": [one.logprobs for one in samples] if has_logprobs else None,
            "env_mask": [[0] * len(one.ids) if one.faulted else one.is_models for one in samples],
            FAULT: [one.faulted for one in samples],
            "tool_calls": [one.count for one in samples],
        }

    async def _roll(self, samples: list[_Sample], trainer: Any) -> bool:
        active, has_logprobs = samples, False
        try:
            for turn in range(self._max_turns + 1):
                has_logprobs = self._generate(active, trainer)
                active = [one for one in active if one.calls]
                if not active or turn == self._max_turns:
                    break
                await asyncio.gather(*(self._answer(one, trainer) for one in active))
                active = [one for one in active if one.calls]
                if not active:
                    break
        finally:
            await self._tool.aclose()  # this loop ends
        return has_logprobs

    def _generate(self, active: list[_Sample], trainer: Any) -> bool:
        """One turn of the model for all; True if it came with log-probabilities."""
        contexts = [one.prompt_ids + one.ids for one in active]
        turns, logprobs = trainer._generate_single_turn(contexts, None, {}, 1)
        for number, (one, ids) in enumerate(zip(active, turns, strict=True)):
            room = trainer.max_completion_length - len(one.ids)
            kept = None if logprobs is None else logprobs[number][:room]
            one.add(ids[:room], kept, is_models=True)
            text = trainer._tokenizer.decode(ids, skip_special_tokens=False)
            one.calls = self._find(text) if len(ids) < room else []
        return logprobs is not None

    async def _answer(self, one: _Sample, trainer: Any) -> None:
        """Run a sample's calls and add what they said; no room for it ends the sample."""
        one.count += len(one.calls)
        try:
            messages = await answer_tool_calls(self._tool, {"tool_calls": one.calls})
        except ServiceFault:
            if not self._mask:
                raise
            one.faulted = True
            one.calls = []
            return
        ids = trainer._get_tool_suffix_ids(messages)
        if len(one.ids) + len(ids) >= trainer.max_completion_length:
            one.calls = []
        else:
            one.add(ids, None, is_models=False)


def unless_faulted(reward_func: Callable[..., list[float | None]]) -> Callable[..., Any]:
    """A reward function that gives None, TRL's word for "not scored", to samples that we failed.

    They then count neither for their group's mean nor for its spread.
    """

    @functools.wraps(reward_func)
    def reward(**columns: Any) -> list[float | None]:
        rewards = reward_func(**columns)
        faulted = columns.get(FAULT) or [False] * len(rewards)
        return [None if bad else one for bad, one in zip(faulted, rewards, strict=True)]

    return reward


def run_in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where the caller's thread has a loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _tokenized(prompts: list[Any], trainer: Any) -> list[list[int]]:
    return trainer.processing_class.apply_chat_template(
        prompts,
        tools=[SCHEMA],
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )["input_ids"]
