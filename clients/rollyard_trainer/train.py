"""A whole training run: stages in sequence, validation, checkpoints, and when to stop.

Before a stage: imitation, if it says so; problems that the policy always solves are dropped; the
optimizer is reset. In it: learning rate, response length and turns as it says. Every so many steps
the policy is measured on validation problems, and by that the guard decides, by a rule that was
fixed before the run. The policy at the end is the last one; after a collapse, the best.
"""

# pyright: basic, reportMissingImports=false

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from rollyard_trainer import loop, monitors, policy, recipe, roc, sft, template, verify
from rollyard_trainer.checkpoint import Progress, Store
from rollyard_trainer.engines import Sampling
from rollyard_trainer.env import PythonToolEnv, Runner
from rollyard_trainer.trajectory import Trajectory

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Question:
    """A problem as the policy reads it."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What a run is made of. Without ``validation`` there is no guard."""

    train: Sequence[Question]
    validation: Sequence[Question] = ()
    demonstrations: Sequence[sft.Demonstration] = ()


class Training:
    """One run; :meth:`finish` makes it, or what is left of it.

    Args:
        run: Runs tool calls, and compares answers that are no integers.
        out: Directory of checkpoints, metrics and the final policy.
        settings: What else decides the run, such as digests of its files; kept beside it.

    Raises:
        ValueError: a stage has a field of no such name, or ``out`` has another run.
    """

    def __init__(
        self, stages: Sequence[recipe.Stage], data: Data, run: Runner, out: Path, seed: int,
        say: Callable[[str], None], settings: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.stages, self.data, self.run, self.say = stages, data, run, say
        self.configs = [config_of(stage) for stage in stages]
        if any(stage.sft for stage in stages) and not data.demonstrations:
            raise ValueError("a stage has [sft], and there are no demonstrations")
        if {stage.model for stage in stages} != {stages[0].model}:
            raise ValueError("all stages train one model; they name several")
        self.env = PythonToolEnv(run=run, **stages[0].env)
        self.store = Store(out)
        self.store.claim({"stages": [asdict(s) for s in stages], "seed": seed, **(settings or {})})
        texts = [row.prompt for row in data.train]
        texts += [turn for row in data.demonstrations for turn in row.turns]
        self.policy = policy.new(stages[0], texts, out, seed)
        self.optimizer = self._new_optimizer()
        self.guard = monitors.CollapseGuard(**stages[0].guard)
        self.rng = np.random.default_rng(seed)
        self.at = self.store.load(self.policy, self.optimizer, self.guard, self.rng)
        self._began, self._first = time.monotonic(), self.at.total

    async def finish(self) -> Progress:
        """Make all that is left; ``ended`` of what is returned says why it is over."""
        if self.at.total or self.at.began:
            self.say(f"continuing after step {self.at.total} of {self._steps()}")
        while not self.at.ended and self.at.stage < len(self.stages):
            self.env = PythonToolEnv(run=self.run, **self.stages[self.at.stage].env)
            if not self.at.began:
                await self._begin_stage()
            stage = self.stages[self.at.stage]
            while not self.at.ended and self.at.step < stage.steps and self.at.problems:
                await self._step(stage)
            if not self.at.ended:
                self.at.stage, self.at.step, self.at.began = self.at.stage + 1, 0, False
        if not self.at.ended:
            self.at.ended = "done"
            self._save()
        self.policy.write(self.store.directory / "final")
        return self.at

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.model.parameters(), lr=0.0, weight_decay=0.0)

    async def _begin_stage(self) -> None:
        stage, config = self.stages[self.at.stage], self.configs[self.at.stage]
        if stage.sft:
            engine = self.policy.engine
            examples = await sft.play_all(
                self.data.demonstrations, self.env, engine.tokenizer, engine.context, self.say
            )
            sft.imitate(
                self.policy.model, examples, seed=self.at.stage, say=self.say, **stage.sft,
                begun=self.store.load_imitation(self.at.stage),
                keep=lambda state: self.store.save_imitation(self.at.stage, state),
            )  # fmt: skip
        if stage.reset_optimizer:
            self.optimizer = self._new_optimizer()
        self.at.problems = self.at.problems or list(range(len(self.data.train)))
        if samples := stage.drop_always_solved:
            before, problems = len(self.at.problems), self.data.train
            solved = self.at.problems
            for _ in range(samples):  # one that failed once stays, and needs no more samples
                groups = await self.evaluate([problems[i] for i in solved], 1, config.sampling)
                solved = [
                    index for index, (one,) in zip(solved, groups, strict=True) if one.reward == 1
                ]
            self.at.problems = [index for index in self.at.problems if index not in set(solved)]
            self.say(f"stage {self.at.stage + 1}: {len(self.at.problems)} of {before} problems are "
                     f"not solved {samples} of {samples} times")  # fmt: skip
            self.store.log(event="dropped", total=self.at.total, stage=self.at.stage + 1,
                           before=before, left=len(self.at.problems))  # fmt: skip
        self.at.deck, self.at.began = [], True
        if self.at.total == 0:
            await self._validate()
        self._save()
        self.store.drop_imitation()
        self._began, self._first = time.monotonic(), self.at.total  # what is left is in steps

    async def _step(self, stage: recipe.Stage) -> None:
        config, began = self.configs[self.at.stage], time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = stage.rate_at(self.at.step)
        done = await loop.step(
            self.policy.engine, self.policy.model, self.optimizer, self._draw(stage.prompts),
            self.env, self.score, config, self.rng,
        )  # fmt: skip
        seen = monitors.describe([one for group in done.trajectories for one in group])
        self.store.log(event="step", total=self.at.total, stage=self.at.stage + 1,
                       step=self.at.step, rate=stage.rate_at(self.at.step),
                       wall_s=time.monotonic() - began, **seen, **done.metrics)  # fmt: skip
        self.at.step += 1
        self.at.total += 1
        per_step = (time.monotonic() - self._began) / (self.at.total - self._first)
        left_s = per_step * (self._steps() - self.at.total)
        self.say(
            f"stage {self.at.stage + 1} of {len(self.stages)}, step {self.at.step} of "
            f"{stage.steps}: accuracy {seen['accuracy']:.3f}, errors in correct "
            f"{seen['error_share']:.3f}, {seen['tokens']:.0f} tokens; {left_s / 60:.0f} min left"
        )
        if self.at.step % stage.validate_every == 0 or self.at.step == stage.steps:
            await self._validate()
            self._save()

    def _draw(self, count: int) -> list[Question]:
        """The next problems of a shuffled deck, which is made anew when it is used up."""
        while len(self.at.deck) < count:
            self.at.deck += self.rng.permutation(self.at.problems).tolist()
        drawn, self.at.deck = self.at.deck[:count], self.at.deck[count:]
        return [self.data.train[index] for index in drawn]

    async def _validate(self) -> None:
        if not self.data.validation:
            return
        config = self.configs[self.at.stage]
        groups = await self.evaluate(self.data.validation, 1, config.sampling)
        seen = monitors.describe([one for group in groups for one in group])
        self.store.log(event="validation", total=self.at.total, **seen)
        self.say(f"validation after step {self.at.total}: accuracy {seen['accuracy']:.3f}")
        collapsed = self.guard.collapsed(self.at.total, seen["accuracy"])
        if self.guard.best_step == self.at.total:
            self.store.keep_best(self.policy)
        if collapsed:
            best = self.guard.best_step
            self.store.back_to_best(self.policy)
            self.store.log(event="collapsed", total=self.at.total, back_to=best)
            self.at.ended = f"collapsed at step {self.at.total}: back to step {best}"

    async def evaluate(
        self, problems: Sequence[Question], samples: int, sampling: Sampling
    ) -> list[list[Trajectory]]:
        """``samples`` scored rollouts of each problem."""
        rows = [problem for problem in problems for _ in range(samples)]
        made: list[Trajectory] = []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            rollouts = await self.policy.engine.rollout(
                [p.prompt for p in part], self.env, sampling
            )
            await loop.grade(rollouts, part, self.score)
            made += rollouts
        return [made[start : start + samples] for start in range(0, len(made), samples)]

    async def score(self, one: Trajectory, problem: loop.Problem) -> float | None:
        """Equation 3; None when it cannot be told."""
        return verify.reward(await verify.check(one.own_text, problem.answer, self.run))

    def _save(self) -> None:
        self.store.save(self.at, self.policy, self.optimizer, self.guard, self.rng)

    def _steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


def config_of(stage: recipe.Stage) -> loop.Config:
    """The loop's configuration for a stage.

    Raises:
        ValueError: a field of ``[train]``, its ``rule``, or ``[sampling]`` has an unknown name.
    """
    train = dict(stage.train)
    try:
        rule = roc.Rule(**train.pop("rule", {}))
        return loop.Config(**train, rule=rule, sampling=Sampling(**stage.sampling))
    except TypeError as error:
        raise ValueError(f"[train] or [sampling]: {error}") from None


def questions(rows: Sequence[tuple[str, str]]) -> list[Question]:
    """Problems, (question, answer), in the paper's prompt."""
    return [Question(template.prompt(question), answer) for question, answer in rows]
