"""The arms of the experiment, and one run of one of them."""

# pyright: basic, reportMissingImports=false

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from rollyard import RunResult
from rollyard_trainer import loop, monitors, roc, verify
from rollyard_trainer.engines import Sampling
from rollyard_trainer.engines.tiny import Shape, TinyEngine, TinyGPT
from rollyard_trainer.env import PythonToolEnv, Runner
from rollyard_trainer.toy import task
from rollyard_trainer.toy.memo import Memo
from rollyard_trainer.trajectory import Trajectory

CONTEXT = 96
EVALUATION_ROWS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all arms of an experiment share; results under different ones are never mixed."""

    steps: int = 80
    prompts: int = 32
    keep: int = 8
    """G; 2G = 16 rollouts per prompt."""
    rate: float = 1e-4
    turns: int = 4
    """T. With 2, a failed call cannot be tried again, and errors cost accuracy."""
    habits: task.Habits = field(default_factory=task.Habits)
    coldstart_steps: int = 600
    coldstart_examples: int = 12_000
    validate_every: int = 10
    validation_problems: int = 300
    test_problems: int = 600
    test_samples: int = 8
    fault_share: float = 0.02
    """Calls that the service fails, in the arms with injected faults."""

    def splits(self) -> task.Splits:
        """The problems of train, validation and test."""
        return task.splits(validation=self.validation_problems, test=self.test_problems)

    def digest(self) -> str:
        """Short name of these settings."""
        return _digest(asdict(self))

    def coldstart_digest(self) -> str:
        """Short name of what decides the cold start."""
        sizes = (self.validation_problems, self.test_problems)
        return _digest([asdict(self.habits), self.coldstart_steps, self.coldstart_examples, *sizes])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train."""

    says: str
    rule: roc.Rule = roc.PAPER
    double: bool = True
    """2G rollouts per prompt, else G."""
    all_prompts: bool = True
    """Else half of the prompts."""
    faults: bool = False
    train_on_faults: bool = False
    penalty: float = 0.0


_ALL = roc.Rule(select="all")
ARMS = {
    "grpo-G": Arm(says="GRPO, G rollouts, all used", rule=_ALL, double=False),
    "grpo-2G": Arm(says="GRPO, 2G rollouts, all used", rule=_ALL),
    "grpo-2G-half": Arm(says="as grpo-2G, half the prompts", rule=_ALL, all_prompts=False),
    "rand-strat": Arm(says="2G to G, half of each class, uniform: the exact control",
                      rule=roc.Rule(select="uniform")),
    "rand": Arm(says="2G to G, uniform", rule=roc.Rule(select="uniform", stratified=False)),
    "roc-err": Arm(says="RoC, p_err only", rule=roc.Rule(use_format=False)),
    "roc-format": Arm(says="RoC, p_format only", rule=roc.Rule(use_error=False)),
    "roc-full": Arm(says="RoC, the paper's"),
    "roc-topk": Arm(says="the released selection", rule=roc.Rule(select="topk", turns="code")),
    "roc-faults": Arm(says="RoC, 2% of calls failed by the service, rollout dropped", faults=True),
    "roc-substring": Arm(says="released error detection, the same faults, trained on",
                         rule=roc.Rule(error_source="substring"), faults=True,
                         train_on_faults=True),
    "penalty": Arm(says="GRPO, 2G, reward minus 0.5 p_err", rule=_ALL, penalty=0.5),
}  # fmt: skip


def faulty(run: Runner, share: float, seed: int) -> Runner:
    """A runner whose service fails a share of the calls: for the arms with faults."""
    chance = random.Random(seed)  # noqa: S311

    async def fail(code: str, stdin: str) -> RunResult:
        if chance.random() < share:
            return RunResult(run_id="injected", outcome="infra_error", message="worker was lost")
        return await run(code, stdin)

    return fail


async def score(one: Trajectory, problem: loop.Problem) -> float | None:
    """Equation 3. Answers are integers, so what is none is wrong, and not unverifiable."""
    return verify.reward(await verify.check(one.own_text, problem.answer)) or 0.0


def config_of(arm: Arm, settings: Settings) -> loop.Config:
    """The loop's configuration for an arm."""
    whole = arm.rule.select == "all"
    return loop.Config(
        keep=settings.keep * (2 if whole and arm.double else 1),
        oversample=1 if whole else 2,
        rule=arm.rule,
        train_on_faults=arm.train_on_faults,
        error_penalty=arm.penalty,
        sampling=Sampling(max_turns=settings.turns, max_tokens=CONTEXT - 8),
    )


def new_model(lexicon: task.Lexicon) -> TinyGPT:
    return TinyGPT(Shape(vocabulary=len(lexicon), context=CONTEXT))


async def evaluate(
    engine: TinyEngine, problems: Sequence[task.PhraseProblem], samples: int, env: PythonToolEnv,
    sampling: Sampling,
) -> list[list[Trajectory]]:  # fmt: skip
    """``samples`` rollouts of each problem, scored."""
    rows = [problem for problem in problems for _ in range(samples)]
    made: list[Trajectory] = []
    for start in range(0, len(rows), EVALUATION_ROWS):
        part = rows[start : start + EVALUATION_ROWS]
        rollouts = await engine.rollout([p.prompt for p in part], env, sampling)
        await loop.grade(rollouts, part, score)
        made += rollouts
    return [made[start : start + samples] for start in range(0, len(made), samples)]


def forking(
    model: TinyGPT, lexicon: task.Lexicon, rows: Sequence[Trajectory]
) -> list[tuple[str, float, int]]:
    """Where the policy hesitates: text, mean entropy and count of the most frequent forks."""
    batch = loop.Batch.of(rows)
    with torch.no_grad():
        _, entropy = loop.logprobs(model, batch.ids, 1.0)
    found = monitors.forking_tokens(
        entropy[batch.mask].numpy(), batch.ids[:, 1:][batch.mask].numpy()
    )
    return [(lexicon.pieces[token], mean, count) for token, mean, count in found[:12]]


async def run_arm(
    name: str, seed: int, settings: Settings, start: dict[str, Any], memo: Memo,
    lexicon: task.Lexicon, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Train one arm with one seed from the cold start; return its curves and test scores.

    The problem stream depends on the seed only. The checkpoint is the last one, by a rule fixed
    beforehand; the test problems are used once, after it.
    """
    arm, began, calls, executed = ARMS[name], time.monotonic(), memo.calls, memo.executed
    cpu = time.process_time()
    sets, sampling = settings.splits(), config_of(arm, settings).sampling
    model = new_model(lexicon)
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=0.0)
    engine, rng = TinyEngine(model, lexicon, seed), np.random.default_rng(seed)
    clean = PythonToolEnv(run=memo, traceback=False)
    env = clean
    if arm.faults:
        env = PythonToolEnv(run=faulty(memo, settings.fault_share, seed), traceback=False,
                            fault_retries=0,  # a fault that lasts
                            on_infra="observe" if arm.train_on_faults else "drop")  # fmt: skip
    stream, guard = random.Random(seed), monitors.CollapseGuard()  # noqa: S311
    curve: list[dict[str, float]] = []
    validation: list[dict[str, float]] = []
    collapsed_at: int | None = None
    checked: list[list[Trajectory]] = []
    for step in range(settings.steps + 1):
        if step % settings.validate_every == 0 or step == settings.steps:
            checked = await evaluate(engine, sets.validation, 1, clean, sampling)
            seen = monitors.describe([one for group in checked for one in group])
            validation.append({"step": step, **seen})
            if guard.collapsed(step, seen["accuracy"]) and collapsed_at is None:
                collapsed_at = step
            say(f"{name} seed {seed} step {step}/{settings.steps}: accuracy {seen['accuracy']:.3f}"
                f", errors in correct {seen['error_share']:.3f}")  # fmt: skip
        if step == settings.steps:
            break
        problems = stream.sample(sets.train, settings.prompts)
        if not arm.all_prompts:
            problems = problems[: settings.prompts // 2]
        done = await loop.step(
            engine, model, optimizer, problems, env, score, config_of(arm, settings), rng
        )
        every = [one for group in done.trajectories for one in group]
        curve.append({"step": step, **monitors.describe(every), **done.metrics})
    forks = forking(model, lexicon, [one for group in checked for one in group][:128])
    trained_s = time.monotonic() - began
    groups = await evaluate(engine, sets.test, settings.test_samples, clean, sampling)
    test = monitors.describe([one for group in groups for one in group])
    return {
        "arm": name, "seed": seed, "settings": settings.digest(), "curve": curve,
        "validation": validation, "test": test, "collapsed_at": collapsed_at, "forks": forks,
        "best_validation_step": guard.best_step,
        "test_scores": [[one.reward for one in group] for group in groups],
        "wall_s": time.monotonic() - began, "train_s": trained_s,
        "cpu_s": time.process_time() - cpu,
        "calls": memo.calls - calls, "executed": memo.executed - executed,
        "mismatched": memo.mismatched,
    }  # fmt: skip
