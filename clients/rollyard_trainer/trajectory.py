"""One rollout: token for token what the policy wrote and what it was given."""

from dataclasses import dataclass, field
from typing import Literal

from rollyard_trainer.roc import Sample, ToolCall

StopReason = Literal[
    "answer",  # a turn without a tool call
    "length",  # no room for another token
    "turns",  # the last allowed turn still made a call
    "infra",  # the service failed it: leave it out
]


@dataclass(slots=True)
class Trajectory:
    """A rollout of one prompt; it grows at its end only, and is never tokenised anew.

    ``ids``, ``mask`` and ``logprobs`` have one entry per token after the prompt.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list[int])
    mask: list[bool] = field(default_factory=list[bool])
    """True for tokens that the policy wrote; only these carry gradient and count as length."""
    logprobs: list[float] = field(default_factory=list[float])
    """Of the policy that wrote the token, natural logarithm; 0 for tokens it was given."""
    text: str = ""
    """All that followed the prompt."""
    own_text: str = ""
    """What the policy wrote of it: only there is its answer, for programs print anything."""
    turns: int = 0
    answers: int = 0
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    reward: float | None = None
    """None: not scored, or unverifiable; such a rollout leaves its group too."""
    stop: StopReason | None = None

    def wrote(self, ids: list[int], logprobs: list[float], text: str) -> None:
        """Append one assistant turn."""
        self.ids += ids
        self.mask += [True] * len(ids)
        self.logprobs += logprobs
        self.text += text
        self.own_text += text
        self.turns += 1
        self.answers += text.count("<answer>")

    def read(self, ids: list[int], text: str) -> None:
        """Append what the environment answered, the next turn's header included."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.text += text

    @property
    def is_infra(self) -> bool:
        """True when nothing can be said of the policy: the service or the verifier failed."""
        return self.stop == "infra" or self.reward is None

    @property
    def written(self) -> int:
        """Tokens that the policy wrote."""
        return sum(self.mask)

    def sample(self) -> Sample:
        """What the selection looks at.

        Raises:
            ValueError: it has no reward.
        """
        if self.reward is None:
            raise ValueError("a trajectory without a reward must leave its group before selection")
        return Sample(self.reward, self.text, self.turns, self.answers, tuple(self.calls))
