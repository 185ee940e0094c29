"""What generates rollouts. The loop needs one method; see :class:`Engine`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Limits of one rollout."""

    max_turns: int = 10
    """T: assistant turns, the last one included."""
    max_tokens: int = 8192
    """Tokens after the prompt, tool responses included."""
    temperature: float = 1.0


class Engine(Protocol):
    """Writes rollouts with the current policy."""

    async def rollout(
        self, prompts: Sequence[str], env: PythonToolEnv, sampling: Sampling
    ) -> list[Trajectory]:
        """One rollout per prompt, in order; repeat a prompt to get a group."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. ``encode`` must not turn text into control tokens."""

    end_id: int
    """The token that ends a turn."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...
