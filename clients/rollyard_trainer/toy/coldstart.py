"""The cold start: imitation of format and habits, not of reasoning (paper §4.1)."""

# pyright: basic, reportMissingImports=false

import asyncio
import random
from collections.abc import Callable, Sequence

from rollyard_trainer import sft
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.toy import task
from rollyard_trainer.trajectory import Trajectory

Progress = Callable[[str], None]
_AT_ONCE = 2048


async def demonstrations(
    problems: Sequence[task.PhraseProblem], count: int, habits: task.Habits, env: PythonToolEnv,
    lexicon: task.Lexicon, seed: int, say: Progress,
) -> list[Trajectory]:  # fmt: skip
    """``count`` rollouts with the habits of the cold start; every call is really run."""
    chance = random.Random(seed)  # noqa: S311
    made: list[Trajectory] = []
    while len(made) < count:
        plans: list[tuple[task.PhraseProblem, list[str]]] = []
        for _ in range(min(_AT_ONCE, count - len(made))):
            problem = chance.choice(problems)
            plans.append((problem, task.demonstration(problem, habits, chance)))
        made += await asyncio.gather(
            *(sft.play(problem.prompt, turns, env, lexicon) for problem, turns in plans)
        )
        say(f"demonstrations: {len(made)} of {count}")
    return made
