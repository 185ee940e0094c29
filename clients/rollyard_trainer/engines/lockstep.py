"""Multi-turn rollouts of a local model, a turn of all rows at a time.

A turn is written by all rows together; when the last has ended its turn, all of their tool calls
run at once. What the tool answered is given to the rows as tokens that they did not choose.
"""

# pyright: basic, reportMissingImports=false

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from rollyard_trainer import template
from rollyard_trainer.engines import Sampling, Tokenizer
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.trajectory import Trajectory


class LockStepEngine(ABC):
    """What decoders of local models share; see :class:`rollyard_trainer.engines.Engine`.

    Args:
        tokenizer: Of the model.
        context: Most tokens that the model can see, prompt included.
        seed: Of the sampling; ``chance`` is its generator, whose state a checkpoint keeps.
        rows: Rollouts at once, which the cache must hold; None: all.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: int, seed: int,
        device: torch.device | str = "cpu", rows: int | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.context, self.rows = tokenizer, context, rows
        self.chance = torch.Generator(device).manual_seed(seed)

    @abstractmethod
    def begin(self, rows: int) -> Any:
        """An empty cache for so many rows."""

    @abstractmethod
    def keep(self, cache: Any, rows: torch.Tensor) -> None:
        """Drop all rows of the cache but these."""

    @abstractmethod
    def write(
        self, given: list[list[int]], room: torch.Tensor, cache: Any, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read ``given``, then let each row write one turn of at most ``room`` tokens, (B,).

        Returns:
            Tokens and their log-probabilities, each (B, T); -1 is a token that a row did not write.
        """

    async def rollout(
        self, prompts: Sequence[str], env: PythonToolEnv, sampling: Sampling
    ) -> list[Trajectory]:
        """One rollout per prompt; a turn of all rows, then all of their tool calls at once.

        Raises:
            ValueError: a prompt leaves the model no room for a token.
        """
        size = self.rows or max(1, len(prompts))
        made: list[Trajectory] = []
        for start in range(0, len(prompts), size):
            made += await self._together(prompts[start : start + size], env, sampling)
        return made

    async def _together(
        self, prompts: Sequence[str], env: PythonToolEnv, sampling: Sampling
    ) -> list[Trajectory]:
        trajectories = [Trajectory(self.tokenizer.encode(prompt)) for prompt in prompts]
        live, given = trajectories, [one.prompt_ids for one in trajectories]
        if any(self._room(one, sampling) <= 0 for one in live):
            longest = max(len(ids) for ids in given)
            raise ValueError(f"a prompt of {longest} tokens fills the context of {self.context}")
        cache = self.begin(len(prompts))
        for turn in range(1, sampling.max_turns + 1):
            texts = self._turn(live, given, cache, sampling)
            answers = await asyncio.gather(*(env.answer(text) for text in texts))
            going: list[int] = []
            given = []
            for row, (one, calls) in enumerate(zip(live, answers, strict=True)):
                one.calls += calls
                if env.on_infra == "drop" and any(c.status == "infra_error" for c in calls):
                    one.stop = "infra"
                elif one.stop is None and not calls:
                    one.stop = "answer"
                elif one.stop is None and turn == sampling.max_turns:
                    one.stop = "turns"
                elif one.stop is None and self._read(
                    one, [c.observation for c in calls], sampling, given
                ):
                    going.append(row)
            if not going:
                break
            live = [live[row] for row in going]
            self.keep(cache, torch.tensor(going))
        return trajectories

    def _read(
        self, one: Trajectory, observations: list[str], sampling: Sampling, given: list[list[int]]
    ) -> bool:
        """Give a row what its calls answered; False when that leaves it no room to go on."""
        text = template.tool_turn(observations)
        ids = self.tokenizer.encode(text)
        if len(ids) >= self._room(one, sampling):
            one.stop = "length"
            return False
        # The turn's last token was sampled, and is not in the cache yet.
        given.append([self.tokenizer.end_id, *ids])
        one.read(ids, text)
        return True

    def _room(self, one: Trajectory, sampling: Sampling) -> int:
        """Tokens that the rollout may still take."""
        return min(sampling.max_tokens, self.context - len(one.prompt_ids)) - len(one.ids)

    @torch.no_grad()
    def _turn(
        self, live: list[Trajectory], given: list[list[int]], cache: Any, sampling: Sampling
    ) -> list[str]:
        room = torch.tensor([self._room(one, sampling) for one in live])
        tokens, scores = self.write(given, room, cache, sampling)
        texts: list[str] = []
        for one, ids, values in zip(live, tokens.tolist(), scores.tolist(), strict=True):
            written = [index for index, token in enumerate(ids) if token >= 0]
            turn = [ids[index] for index in written]
            texts.append(self.tokenizer.decode(turn))
            one.wrote(turn, [values[index] for index in written], texts[-1])
            if turn[-1] != self.tokenizer.end_id:
                one.stop = "length"
        return texts
