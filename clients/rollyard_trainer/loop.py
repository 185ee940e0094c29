"""One training step, in the order of the paper: rollouts, rewards, selection, advantages, update.

Prompts whose rollouts all have the same reward are rejected. Rollouts that the service or the
verifier failed leave their group before selection, mean and standard deviation; none is scored 0.
"""

# pyright: basic, reportMissingImports=false

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from rollyard_trainer import objective, roc
from rollyard_trainer.engines import Engine, Sampling
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.trajectory import Trajectory


class Problem(Protocol):
    """What is asked, as the policy reads it, and what is right."""

    @property
    def prompt(self) -> str: ...

    @property
    def answer(self) -> str: ...


Score = Callable[[Trajectory, Problem], Awaitable[float | None]]
"""Reward of a rollout: 1, 0, or None when it cannot be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a step trains. Defaults are the paper's where it has one."""

    keep: int = 16
    """G, rollouts of a prompt that are trained on."""
    oversample: int = 2
    """Rollouts made for each one kept."""
    rule: roc.Rule = roc.PAPER
    train_on_faults: bool = False
    """Train on rollouts that the service failed, as the released code does. For comparison."""
    error_penalty: float = 0.0
    """Subtracted from the reward times p_err: the alternative that the paper rejects."""
    normalisation: objective.Normalisation = "group_token"
    clip: objective.Clip = objective.CLIP_HIGHER
    updates: int = 1
    """Optimizer steps per batch. With 1 the ratio is 1 everywhere, and clipping does nothing."""
    micro_rows: int = 128
    """Rows in one forward pass; changes memory, not the result."""
    max_gradient: float = 1.0
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(slots=True)
class Step:
    """What one step did."""

    trajectories: list[list[Trajectory]]
    """All rollouts, prompt by prompt, before selection."""
    chosen: list[Trajectory] = field(default_factory=list[Trajectory])
    metrics: dict[str, float] = field(default_factory=dict[str, float])


async def step(
    engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer,
    problems: Sequence[Problem], env: PythonToolEnv, score: Score, config: Config,
    rng: np.random.Generator,
) -> Step:  # fmt: skip
    """Make rollouts of ``problems``, select, and update ``model``, which ``engine`` writes with."""
    count = config.keep * config.oversample
    prompts = [problem.prompt for problem in problems for _ in range(count)]
    rollouts = await engine.rollout(prompts, env, config.sampling)
    groups = [rollouts[start : start + count] for start in range(0, len(rollouts), count)]
    await grade(rollouts, [problem for problem in problems for _ in range(count)], score)
    result = Step(groups)
    selected = [pair for group in groups if (pair := choose(group, config, rng, result.metrics))]
    if selected:
        update(model, optimizer, selected, config, result.metrics)
    result.chosen = [one for group, _ in selected for one in group]
    result.metrics["groups"] = len(selected)
    result.metrics["rows"] = len(result.chosen)
    return result


async def grade(rollouts: Sequence[Trajectory], problems: Sequence[Problem], score: Score) -> None:
    """Set the reward of each rollout, all at once, but of those that the service failed."""

    async def one(rollout: Trajectory, problem: Problem) -> None:
        if rollout.stop != "infra":
            rollout.reward = await score(rollout, problem)

    await asyncio.gather(*map(one, rollouts, problems))


Selected = tuple[list[Trajectory], np.ndarray]
"""Rollouts of one prompt and their advantages."""


def choose(
    group: list[Trajectory], config: Config, rng: np.random.Generator, metrics: dict[str, float]
) -> Selected | None:
    """Select among the rollouts of one prompt; None when they carry no signal.

    ``metrics`` counts why: ``lost_infra``, ``equal`` (rejected), ``lost_by_selection``.
    """
    valid = [one for one in group if not one.is_infra]
    metrics["lost_infra"] = metrics.get("lost_infra", 0) + len(group) - len(valid)
    samples = [one.sample() for one in valid]
    if len({sample.reward for sample in samples}) < 2 and not config.error_penalty:
        metrics["equal"] = metrics.get("equal", 0) + 1
        return None
    keep = max(2, min(config.keep, -(-len(valid) * config.keep // len(group))))
    if len(valid) < keep:
        return None
    faulty = (lambda _: False) if config.train_on_faults else (lambda sample: sample.is_infra)
    index = roc.select(samples, keep, rng, config.rule, is_infra=faulty)
    rewards = [samples[i].reward for i in index]
    if config.error_penalty:
        penalty = [config.error_penalty * roc.error_penalty(samples[i]) for i in index]
        rewards = [reward - less for reward, less in zip(rewards, penalty, strict=True)]
    if len(set(rewards)) < 2:
        metrics["lost_by_selection"] = metrics.get("lost_by_selection", 0) + 1
        return None
    return [valid[i] for i in index], objective.advantages(rewards)


@dataclass(slots=True)
class Batch:
    """Rollouts as tensors, aligned with the token that is predicted: (B, T - 1) but for ``ids``."""

    ids: torch.Tensor
    mask: torch.Tensor
    old: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Trajectory]) -> "Batch":
        """Pad on the right; a causal model does not see it."""
        length = max(len(one.prompt_ids) + len(one.ids) for one in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        mask, old = torch.zeros(len(rows), length - 1), torch.zeros(len(rows), length - 1)
        for row, one in enumerate(rows):
            start, whole = len(one.prompt_ids), one.prompt_ids + one.ids
            ids[row, : len(whole)] = torch.tensor(whole)
            mask[row, start - 1 : len(whole) - 1] = torch.tensor(one.mask, dtype=torch.float32)
            old[row, start - 1 : len(whole) - 1] = torch.tensor(one.logprobs)
        return cls(ids, mask.bool(), old)

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.ids.to(device), self.mask.to(device), self.old.to(device))


def logprobs(model: nn.Module, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probability of each token but the first, and entropy where it was chosen: (B, T - 1)."""
    logits = F.log_softmax(model(ids[:, :-1]) / temperature, dim=-1)
    entropy = -(logits.detach().exp() * logits.detach()).sum(-1)
    return logits.gather(-1, ids[:, 1:, None])[..., 0], entropy


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, selected: Sequence[Selected],
    config: Config, metrics: dict[str, float],
) -> None:  # fmt: skip
    """Take ``config.updates`` optimizer steps, each on its share of the prompts."""
    shares = [selected[part :: config.updates] for part in range(config.updates)]
    clipped, entropy, tokens, norms = 0.0, 0.0, 0.0, []
    device = next(model.parameters()).device
    for share in filter(None, shares):
        rows = [one for group, _ in share for one in group]
        batch = Batch.of(rows).to(device)
        groups = torch.tensor(
            [i for i, (group, _) in enumerate(share) for _ in group], device=device
        )
        advantage = torch.tensor(np.concatenate([gain for _, gain in share])).to(device)
        weights = objective.token_weights(
            batch.mask, groups, config.normalisation, max_tokens=config.sampling.max_tokens
        )
        optimizer.zero_grad(set_to_none=True)
        lengths = torch.tensor([len(one.prompt_ids) + len(one.ids) for one in rows])
        # Rows of like length share a forward pass, which is as wide as its longest.
        for part in lengths.argsort().split(config.micro_rows):
            width = int(lengths[part].max())
            ids, mask, old, weight = (
                whole[part.to(device), : width - less]
                for whole, less in ((batch.ids, 0), (batch.mask, 1), (batch.old, 1), (weights, 1))
            )
            now, spread = logprobs(model, ids, config.sampling.temperature)
            gain = advantage[part.to(device)]
            loss = objective.policy_loss(now, old, gain, weight, config.clip)
            loss.value.backward()
            written = float(mask.sum())
            clipped += loss.clipped * written
            entropy += float(spread[mask].sum())
            tokens += written
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient)))
        optimizer.step()
    metrics |= {"clip_fraction": clipped / tokens, "entropy": entropy / tokens,
                "trained_tokens": tokens, "gradient_norm": float(np.mean(norms))}  # fmt: skip
