"""The cold start: imitation of format and habits, not of reasoning (paper §4.1)."""

# pyright: basic, reportMissingImports=false

import asyncio
import random
from collections.abc import Callable, Sequence

import torch

from rollyard_trainer import template
from rollyard_trainer.engines.tiny import TinyGPT
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.loop import Batch, logprobs
from rollyard_trainer.toy import task
from rollyard_trainer.trajectory import Trajectory

Progress = Callable[[str], None]
ROWS, PEAK_RATE = 64, 3e-3
_AT_ONCE = 2048


async def demonstrations(
    problems: Sequence[task.PhraseProblem], count: int, habits: task.Habits, env: PythonToolEnv,
    lexicon: task.Lexicon, seed: int, say: Progress,
) -> list[Trajectory]:  # fmt: skip
    """``count`` rollouts with the habits of the cold start; every call is really run."""
    chance = random.Random(seed)  # noqa: S311
    made: list[Trajectory] = []
    while len(made) < count:
        plans: list[tuple[task.PhraseProblem, list[str], bool]] = []
        for _ in range(min(_AT_ONCE, count - len(made))):
            problem = chance.choice(problems)
            plans.append((problem, task.demonstration(problem, habits, chance),
                          chance.random() < habits.second_answer))  # fmt: skip
        made += await asyncio.gather(*(_play(*plan, env, lexicon) for plan in plans))
        say(f"demonstrations: {len(made)} of {count}")
    return made


async def _play(
    problem: task.PhraseProblem, turns: list[str], twice: bool,
    env: PythonToolEnv, lexicon: task.Lexicon,
) -> Trajectory:  # fmt: skip
    one = Trajectory(lexicon.encode(problem.prompt))
    observation = ""
    for turn in turns:
        ids = lexicon.encode(turn)
        one.wrote(ids, [0.0] * len(ids), turn)
        calls = await env.answer(turn)
        one.calls += calls
        observation = calls[-1].observation
        answer = template.tool_turn([call.observation for call in calls])
        one.read(lexicon.encode(answer), answer)
    last = task.answer_turn(observation, twice=twice)
    ids = lexicon.encode(last)
    one.wrote(ids, [0.0] * len(ids), last)
    return one


def imitate(
    model: TinyGPT, examples: Sequence[Trajectory], steps: int, seed: int, say: Progress
) -> None:
    """Supervised fine-tuning on the tokens that the demonstrator wrote."""
    chance = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95))
    warm, recent = max(1, steps // 25), 0.0
    for step in range(steps):
        # Warm-up over 4% of the steps, then a half cosine, as in the paper's fine-tuning.
        turn = torch.tensor(torch.pi * step / steps)
        rate = PEAK_RATE * min(1.0, (step + 1) / warm) * float(0.5 + 0.5 * turn.cos())
        optimizer.param_groups[0]["lr"] = rate
        index = torch.randint(len(examples), (ROWS,), generator=chance)
        batch = Batch.of([examples[i] for i in index.tolist()])
        scores, _ = logprobs(model, batch.ids, 1.0)
        loss = -scores[batch.mask].mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = 0.95 * recent + 0.05 * float(loss.detach()) if step else float(loss.detach())
        if (step + 1) % 100 == 0:
            say(f"cold start: step {step + 1} of {steps}, loss {recent:.3f}")
