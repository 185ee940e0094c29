"""Measure a model that a server serves, with or without tools, under one protocol."""

import asyncio
from collections.abc import Callable, Sequence

from rollyard_trainer import monitors, template, verify
from rollyard_trainer.engines import Engine, Sampling
from rollyard_trainer.env import PythonToolEnv, Runner
from rollyard_trainer.evals.protocol import Problem, Protocol, Result
from rollyard_trainer.trajectory import Trajectory

_AT_ONCE = 256

_IMAGE = """\
import hashlib, platform
from importlib.metadata import distributions
held = sorted({f"{one.metadata['Name']}=={one.version}" for one in distributions()})
told = "\\n".join([platform.python_version(), platform.machine(), *held])
print(hashlib.sha256(told.encode()).hexdigest()[:12])
"""


async def image_of(run: Runner) -> str:
    """What programs find in the service's image: its template's name, and a digest of its Python
    and of all libraries with their versions.

    Raises:
        RollyardError: the service did not run the program that asks.
    """
    result = (await run(_IMAGE, "")).raise_for_outcome()
    return f"{result.template}-{result.stdout.strip()}"


async def measure(
    engine: Engine, model: str, problems: Sequence[Problem], protocol: Protocol, run: Runner,
    say: Callable[[str], None],
) -> Result:  # fmt: skip
    """avg@k of one model; ``run`` runs its calls, and compares answers that are no integers."""
    sampling = Sampling(
        max_turns=protocol.turns if protocol.tools else 1,
        max_tokens=protocol.max_tokens,
        temperature=protocol.temperature,
    )
    env, rows = PythonToolEnv(run=run), [p for p in problems for _ in range(protocol.k)]
    made: list[Trajectory] = []
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        prompts = [template.prompt(p.question, tools=protocol.tools) for p in part]
        rollouts = await engine.rollout(prompts, env, sampling)
        kept = [pair for pair in zip(rollouts, part, strict=True) if pair[0].stop != "infra"]
        verdicts = await asyncio.gather(
            *(verify.check(one.own_text, problem.answer, run) for one, problem in kept)
        )
        for (one, _), verdict in zip(kept, verdicts, strict=True):
            one.reward = verify.reward(verdict)
        made += rollouts
        known = [one.reward for one in made if one.reward is not None]
        say(f"{len(made)} of {len(rows)} samples, accuracy {sum(known) / max(1, len(known)):.3f}")
    scores = [one.reward for one in made]
    k = protocol.k
    return Result(
        model,
        protocol,
        [scores[start : start + k] for start in range(0, len(scores), k)],
        monitors.describe(made),
    )
