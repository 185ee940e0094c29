"""TRL's ``GRPOTrainer`` with GRPO-RoC, without a subclass.

    GRPOTrainer(
        environment_factory=PythonEnvironment,
        reward_funcs=[RocReward(reward, num_generations=32)],
        args=GRPOConfig(num_generations=32, loss_type="dapo", beta=0.0, epsilon=0.2,
                        epsilon_high=0.28, …), …)

TRL leaves a rollout whose reward is None out of its group's mean and deviation, and gives it
advantage 0: so RoC is a reward function that says None for what was not selected. Written for and
checked with TRL 1.16.0. What differs from :mod:`rollyard_trainer.loop`: rows that were left out
still go through forward and backward, and their tokens count in the loss's denominator (not so in
:mod:`rollyard_trainer.adapters.trl_trainer`); that is the batch's, not the group's; TRL answers
calls that are no JSON itself, so they do not count in p_err.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from rollyard import BadRequest, Client, Limits, PayloadTooLarge, RollyardError
from rollyard_trainer import roc
from rollyard_trainer.adapters import group
from rollyard_trainer.env import FAULT_RETRIES, render, type_of


class PythonEnvironment:
    """One rollout's tool and the record of its calls; all of a process share connections.

    The service and its key come from ``ROLLYARD_URL`` and ``ROLLYARD_API_KEY``; subclass to set
    ``client`` or ``limits``.
    """

    client: ClassVar[Client | None] = None
    limits: ClassVar[Limits] = Limits()

    def __init__(self) -> None:
        self._calls: list[roc.ToolCall] = []

    def reset(self, **_: object) -> None:
        """Begin a new rollout."""
        self._calls = []

    # TRL makes a tool of every public method, so the record is behind a name it does not see.
    @property
    def _record(self) -> tuple[roc.ToolCall, ...]:
        return tuple(self._calls)

    def execute_python_code_with_standard_io(self, code: str, input: str = "") -> str:
        """Execute Python code with standard input and capture standard output.

        Args:
            code: A string containing Python code to be executed.
            input: A string that will be provided as standard input to the code.

        Returns:
            The output, or the error message.
        """
        call = self._run(code, input)
        self._calls.append(call)
        return call.observation

    def _run(self, code: str, stdin: str) -> roc.ToolCall:
        if type(self).client is None:
            type(self).client = Client()
        assert self.client is not None
        for left in range(FAULT_RETRIES, -1, -1):
            try:
                result = self.client.run(code, stdin=stdin, limits=self.limits, echo_last=True)
            except (BadRequest, PayloadTooLarge) as error:
                return roc.ToolCall("parse_error", f"Failed to parse tool call: {error}", code)
            except RollyardError as error:
                return roc.ToolCall("infra_error", f"Error when executing tool: {error}", code)
            if not (result.is_infra and left):
                return roc.ToolCall(type_of[result.outcome], render(result), code)
        raise AssertionError("unreachable")


class RocReward:
    """A reward function that scores only what RoC selects.

    Args:
        reward: Scores correctness, called as TRL calls it: 1, 0, or None when it cannot tell.
        num_generations: 2G, as in ``GRPOConfig``; groups must not be split over processes.
        keep: G; default half of ``num_generations``.
        rule: How to select.
        seed: Of the selection.
    """

    def __init__(
        self, reward: Callable[..., Sequence[float | None]], *, num_generations: int,
        keep: int | None = None, rule: roc.Rule = roc.PAPER, seed: int = 0,
    ) -> None:  # fmt: skip
        self.__name__ = "roc"  # TRL names metrics after it
        self._reward, self._size, self._rule = reward, num_generations, rule
        self._keep = keep or num_generations // 2
        self._rng = np.random.default_rng(seed)
        self.chosen: list[float | None] = []
        """What the last call returned; :class:`~.trl_trainer.RocTrainer` reads it."""

    def __call__(
        self, *, prompts: Sequence[Any], completions: Sequence[Any],
        environments: Sequence[PythonEnvironment], **columns: Any,
    ) -> list[float | None]:  # fmt: skip
        """Rewards of the selected rollouts, None for all others.

        Raises:
            ValueError: the rows are not whole groups.
        """
        rewards = self._reward(
            prompts=prompts, completions=completions, environments=environments, **columns
        )
        chosen: list[float | None] = [None] * len(rewards)
        if len(rewards) % self._size:
            raise ValueError(f"{len(rewards)} rows are no whole groups of {self._size}")
        for start in range(0, len(rewards), self._size):
            rows = range(start, start + self._size)
            if any(prompts[row] != prompts[start] for row in rows):
                raise ValueError("a group has several prompts: groups must not straddle processes")
            samples = [
                None if score is None else sample_of(completions[row], score, environments[row])
                for row, score in zip(rows, rewards[start : start + self._size], strict=True)
            ]
            for index in group.select(samples, self._keep, self._rng, self._rule):
                chosen[rows[index]] = rewards[rows[index]]
        self.chosen = chosen
        return chosen


def sample_of(completion: Any, reward: float, environment: PythonEnvironment) -> roc.Sample:
    """What the selection needs of a completion: TRL's messages, or its text."""
    messages = [{"role": "assistant", "content": completion}]
    if isinstance(completion, list):
        messages = cast("list[dict[str, Any]]", completion)
    own = [str(m.get("content") or "") for m in messages if m["role"] == "assistant"]
    text = "".join(str(m.get("content") or "") for m in messages)
    answers = sum(turn.count("<answer>") for turn in own)
    return roc.Sample(reward, text, max(1, len(own)), answers, environment._record)  # pyright: ignore[reportPrivateUsage]
