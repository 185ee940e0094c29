"""slime: a generate function with the tool ``python``, over any number of turns.

    --custom-generate-function-path rollyard.integrations.slime.generate

The prompt must be a list of messages (or text that tells the model of the tool). The gateway and
its key come from ``ROLLYARD_URL`` and ``ROLLYARD_API_KEY``; for other settings make a
:class:`ToolGenerate` in a file of your own and name that. slime is not on PyPI: this is written
against its ``examples/retool`` of 2026-08, and was not run inside slime.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from typing import Any

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

from rollyard.integrations.observation import ServiceFault
from rollyard.integrations.openai_tools import answer_tool_calls
from rollyard.integrations.python_tool import SCHEMA, AsyncPythonTool
from rollyard.integrations.tool_calls import find_calls


class ToolGenerate:
    """``await generate(args, sample, sampling_params)``, as slime calls it for each sample.

    A sample whose call the service could not run is ABORTED, has ``remove_sample`` set and a loss
    mask of zeros: slime tries it again or leaves it out, and nothing is learned from it.

    Args:
        tool: One for all samples: their calls travel together. Default: from the environment.
        max_turns: Turns with calls that are answered; then one last turn of the model.
        find: The calls in one turn's text, in OpenAI's form.
    """

    def __init__(
        self,
        tool: AsyncPythonTool | None = None,
        *,
        max_turns: int = 8,
        find: Callable[[str], list[dict[str, Any]]] = find_calls,
    ) -> None:
        self._tool = tool
        self._max_turns = max_turns
        self._find = find

    async def __call__(self, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        """Roll one sample out."""
        if self._tool is None:
            self._tool = AsyncPythonTool()
        tokenizer = GenerateState(args).tokenizer
        prompt_ids = _prompt_ids(sample.prompt, tokenizer)
        rolled = _Rolled(prompt_ids, _room(args, prompt_ids))
        sample.status = Sample.Status.TRUNCATED
        for turn in range(self._max_turns + 1):
            if rolled.room <= 0:
                break
            reason = await _turn(args, rolled, sampling_params)
            if reason in ("abort", "length"):
                if reason == "abort":
                    sample.status = Sample.Status.ABORTED
                break
            calls = self._find(tokenizer.decode(rolled.last))
            if not calls:
                sample.status = Sample.Status.COMPLETED
                break
            if turn == self._max_turns:
                break
            try:
                messages = await answer_tool_calls(self._tool, {"tool_calls": calls})
            except ServiceFault:
                sample.status, sample.remove_sample = Sample.Status.ABORTED, True
                rolled.mask = [0] * len(rolled.mask)
                break
            ended = rolled.last[-1:] == [tokenizer.eos_token_id]
            rolled.add(suffix_ids(tokenizer, messages, after_eos=ended), None)
        rolled.write(sample, tokenizer)
        return sample


generate = ToolGenerate()
"""With all defaults."""


class _Rolled:
    """What a sample has so far, and how many tokens there is room for."""

    def __init__(self, prompt_ids: list[int], room: int) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.last: list[int] = []
        """The model's last turn."""
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.room = room

    def add(self, ids: list[int], logprobs: list[float] | None) -> None:
        """Add the model's tokens, or with None for its log-probabilities a tool's."""
        ids = ids[: self.room]
        self.room -= len(ids)
        self.ids += ids
        self.mask += [int(logprobs is not None)] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs[: len(ids)]

    def write(self, sample: Any, tokenizer: Any) -> None:
        sample.tokens = self.prompt_ids + self.ids
        sample.response = tokenizer.decode(self.ids)
        sample.response_length = len(self.ids)
        sample.loss_mask = self.mask
        sample.rollout_log_probs = self.logprobs


async def _turn(args: Any, rolled: _Rolled, sampling_params: dict[str, Any]) -> str:
    """One turn of the model; why it ended: stop, length or abort."""
    tokens = min(sampling_params.get("max_new_tokens", rolled.room), rolled.room)
    answer = await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {
            "input_ids": rolled.prompt_ids + rolled.ids,
            "sampling_params": {**sampling_params, "max_new_tokens": tokens},
            "return_logprob": True,
        },
    )
    about = answer["meta_info"]
    reason = about["finish_reason"]["type"]
    if reason == "abort" or "output_token_logprobs" not in about:
        return "abort"  # tokens without log-probabilities cannot be trained on
    rolled.last = [one[1] for one in about["output_token_logprobs"]]
    rolled.add(rolled.last, [one[0] for one in about["output_token_logprobs"]])
    return reason


def _prompt_ids(prompt: Any, tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(
            prompt, tools=[SCHEMA], add_generation_prompt=True, tokenize=False
        )
    return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def _room(args: Any, prompt_ids: list[int]) -> int:
    longest = args.rollout_max_context_len
    if longest is None:
        longest = args.context_parallel_size * args.max_tokens_per_gpu
    return longest - len(prompt_ids)


def suffix_ids(tokenizer: Any, messages: list[dict[str, Any]], *, after_eos: bool) -> list[int]:
    """The tokens from the end of the model's turn to the beginning of its next one.

    They are what the chat template puts after an assistant's message, whatever it is; so nothing
    of the model's own tokens is tokenized anew.
    """
    call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
    before: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    begun = tokenizer.apply_chat_template(before, tokenize=False)
    whole = tokenizer.apply_chat_template(
        before + messages, add_generation_prompt=True, tokenize=False
    )
    head, eos, _ = begun.rpartition(tokenizer.eos_token)
    kept = head + eos if eos else begun
    if not whole.startswith(kept):
        raise ValueError("the chat template changes earlier messages when later ones are added")
    text = whole[len(kept) :]
    if eos and not after_eos:
        text = eos + text
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
