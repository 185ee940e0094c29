"""Supervised fine-tuning before reinforcement learning: format and tools only (paper §4.1).

A demonstration is what an assistant wrote, turn by turn. What its calls returned is not in it: they
are run by the service, so the policy never sees an output that the tool would not give.
"""

# pyright: basic, reportMissingImports=false

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollyard_trainer import template
from rollyard_trainer.engines import Tokenizer
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.loop import Batch, logprobs
from rollyard_trainer.trajectory import Trajectory

_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One line of a JSONL file: ``{"problem": …, "turns": ["…<tool_call>…", …, "…<answer>…"]}``.

    ``{observation}`` in a turn stands for what the call before it returned.
    """

    question: str
    turns: list[str]


def read_demonstrations(path: Path) -> list[Demonstration]:
    """The demonstrations of a file.

    Raises:
        ValueError: a line is not as it must be; the message has its number.
    """
    found: list[Demonstration] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            if not row["turns"] or not all(isinstance(turn, str) for turn in row["turns"]):
                raise TypeError("turns must be texts, one at least")
            found.append(Demonstration(str(row["problem"]), row["turns"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{path}:{number}: need "problem" and "turns": {error}') from None
    return found


async def play(
    prompt: str, turns: Sequence[str], env: PythonToolEnv, tokenizer: Tokenizer
) -> Trajectory:
    """The rollout that a demonstration makes, its calls run by ``env``."""
    one, observation = Trajectory(tokenizer.encode(prompt)), ""
    for number, turn in enumerate(turns, start=1):
        text = turn.replace(template.OBSERVATION, template.quoted(observation))
        text = text if text.endswith(template.END) else text + template.END
        ids = tokenizer.encode(text)
        one.wrote(ids, [0.0] * len(ids), text)
        if number == len(turns):
            break
        calls = await env.answer(text)
        one.calls += calls
        observation = calls[-1].observation if calls else ""
        answer = template.tool_turn([call.observation for call in calls])
        one.read(tokenizer.encode(answer), answer)
    return one


async def play_all(
    rows: Sequence[Demonstration], env: PythonToolEnv, tokenizer: Tokenizer,
    context: int, say: Callable[[str], None],
) -> list[Trajectory]:  # fmt: skip
    """All demonstrations as rollouts, but those that are longer than ``context`` tokens, or had a
    call that the service failed.

    Raises:
        ValueError: none is left.
    """
    made: list[Trajectory] = []
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        made += await asyncio.gather(
            *(play(template.prompt(row.question), row.turns, env, tokenizer) for row in part)
        )
        say(f"demonstrations: {len(made)} of {len(rows)}")
    kept = [
        one
        for one in made
        if len(one.prompt_ids) + len(one.ids) <= context
        and all(call.status != "infra_error" for call in one.calls)
    ]
    if len(kept) < len(made):
        say(f"{len(made) - len(kept)} of them left out: over {context} tokens, or not run")
    if not kept:
        raise ValueError(f"no demonstration was run and has at most {context} tokens")
    return kept


def imitate(
    model: nn.Module, examples: Sequence[Trajectory], steps: int, seed: int,
    say: Callable[[str], None], *, rows: int = 64, rate: float = 3e-3,
    begun: Mapping[str, Any] | None = None, keep: Callable[[dict[str, Any]], None] | None = None,
) -> None:  # fmt: skip
    """Train on the tokens that the demonstrator wrote.

    Args:
        steps: Optimizer steps, each on ``rows`` examples.
        seed: Of the order of examples.
        rate: Peak learning rate, after a warm-up over 4% of the steps; then a half cosine, as in
            the paper's fine-tuning.
        begun: What ``keep`` was given last, to go on from there.
        keep: Told all that going on takes, every 100 steps and at the end.
    """
    chance = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    warm, recent, first = max(1, steps // 25), 0.0, 0
    if begun is not None:
        model.load_state_dict(begun["model"])
        optimizer.load_state_dict(begun["optimizer"])
        chance.set_state(begun["chance"])
        first, recent = begun["step"], begun["recent"]
        say(f"cold start: continuing after step {first} of {steps}")
    for step in range(first, steps):
        turn = torch.tensor(torch.pi * step / steps)
        now = rate * min(1.0, (step + 1) / warm) * float(0.5 + 0.5 * turn.cos())
        optimizer.param_groups[0]["lr"] = now
        index = torch.randint(len(examples), (rows,), generator=chance)
        batch = Batch.of([examples[i] for i in index.tolist()]).to(device)
        scores, _ = logprobs(model, batch.ids, 1.0)
        loss = -scores[batch.mask].mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = 0.95 * recent + 0.05 * float(loss.detach()) if step else float(loss.detach())
        if (step + 1) % 100 == 0 or step + 1 == steps:
            say(f"cold start: step {step + 1} of {steps}, loss {recent:.3f}")
            if keep is not None:
                keep({
                    "step": step + 1, "recent": recent, "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(), "chance": chance.get_state(),
                })  # fmt: skip
