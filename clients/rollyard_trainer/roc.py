"""Resample on Correct: which G of 2G rollouts of one prompt the update sees (paper §2.2.3).

From the failures, half, uniformly. From the successes, the rest, without replacement, with
probability inversely proportional to ``p_total = p_err + p_format`` (equations 4 and 5). Rewards,
advantages and the loss know nothing of it.

The released code (microsoft/rStar, ``resample_of_correct``) differs from the paper; its rules are
here as ``select="topk"``, ``error_source="substring"`` and ``turns="code"``, for comparison only.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

CallStatus = Literal[
    "ok",
    "parse_error",  # the call is no JSON, or not a call of this tool
    "exec_error",  # exception, exit code other than 0, signal
    "timeout",  # wall clock or CPU time
    "oom",
    "output_limit",
    "infra_error",  # the service's fault; says nothing about the policy
]
ERRORS: frozenset[CallStatus] = frozenset({"parse_error", "exec_error", "timeout", "oom"})
"""The paper's three failure modes, and running out of memory."""

NO_CALL_PENALTY = 0.5  # "to encourage tool usage" (equation 4)
MIN_PER_CLASS = 2  # of the released code


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call and how it ended; ``status`` comes from the service, never from text."""

    status: CallStatus
    observation: str = ""
    """What the policy read; only ``error_source="substring"`` looks at it."""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the selection needs to know of one rollout."""

    reward: float
    """Success is a reward above 0."""
    text: str
    """All that followed the prompt, tool responses and turn headers included."""
    turns: int
    """Assistant turns."""
    answers: int
    """``<answer>`` tags that the policy wrote; a program may print some too."""
    calls: tuple[ToolCall, ...] = ()

    @property
    def is_infra(self) -> bool:
        """True when the service failed it: it leaves the group before mean, std and selection."""
        return any(call.status == "infra_error" for call in self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How to select; the defaults are the paper's."""

    select: Literal["roc", "uniform", "topk", "all"] = "roc"
    """``uniform``: no weights (the control). ``topk``: the released code. ``all``: no selection."""
    stratified: bool = True
    """For ``uniform``: half of each class, which is the exact control of RoC; else of the whole."""
    use_error: bool = True
    use_format: bool = True
    error_source: Literal["status", "substring"] = "status"
    turns: Literal["paper", "code"] = "paper"
    keep_one: bool = True
    """Keep a lone failure. The paper's floor(1/2) = 0 leaves equal rewards: the group is lost."""
    epsilon: float = 0.1
    """Weight is 1 / (p_total + epsilon), since p_total is often 0. A penalty of 1 then weighs 1/11
    of none; towards 0 it is top-k with random ties, towards infinity uniform."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError("epsilon must be above 0: a clean rollout has p_total 0")


PAPER = Rule()


def error_penalty(sample: Sample, *, source: Literal["status", "substring"] = "status") -> float:
    """p_err of equation 4: the share of tool calls that failed; 0.5 without any call.

    ``substring`` is the released rule: a tool response with "error" in it. It misses calls that
    were no JSON and time-outs, and blames the policy for results such as "standard error 0.03"
    and for faults of the service.
    """
    if not sample.calls:
        return NO_CALL_PENALTY
    if source == "substring":
        bad = sum("error" in call.observation.lower() for call in sample.calls)
    else:
        bad = sum(call.status in ERRORS for call in sample.calls)
    return bad / len(sample.calls)


def format_penalty(sample: Sample, *, turns: Literal["paper", "code"] = "paper") -> float:
    """p_format of equation 5: 1 without an answer tag, else min(1, (tags - 1) / turns).

    ``code`` counts turns as the released code does: by header and end marker in the text after the
    prompt, which lacks the first header, so one too few; none at all costs 1.
    """
    if turns == "code":
        tags = sample.text.count("<answer>")
        closed = len(re.findall(r"<answer>.*?</answer>", sample.text, re.DOTALL))
        count = len(re.findall(r"<\|im_start\|>assistant.*?<\|im_end\|>", sample.text, re.DOTALL))
        if closed == 0 or closed != tags or closed != sample.text.count("</answer>") or count == 0:
            return 1.0
        return min(1.0, (closed - 1) / count)
    if sample.answers == 0:
        return 1.0
    return min(1.0, (sample.answers - 1) / max(1, sample.turns))


def penalties(samples: Sequence[Sample], rule: Rule = PAPER) -> np.ndarray:
    """p_total of each sample, float64 of shape (n,), between 0 and 2."""
    total = np.zeros(len(samples))
    for index, sample in enumerate(samples):
        if rule.use_error:
            total[index] += error_penalty(sample, source=rule.error_source)
        if rule.use_format:
            total[index] += format_penalty(sample, turns=rule.turns)
    return total


def select(
    samples: Sequence[Sample],
    keep: int,
    rng: np.random.Generator,
    rule: Rule = PAPER,
    *,
    is_infra: Callable[[Sample], bool] = lambda sample: sample.is_infra,
) -> list[int]:
    """Choose the rollouts of one prompt that are trained on.

    Args:
        samples: The 2G rollouts of one prompt.
        keep: G. If the service failed some rollouts, the same share of the others is kept.
        rng: Decides; the same state gives the same choice.
        rule: The paper's, a control, or the released code's.
        is_infra: Which rollouts to leave out first. The ``substring`` arm of an ablation passes
            ``lambda _: False``: the released code trains on them.

    Returns:
        Indices into ``samples``, ascending, at most ``keep``; ``select="all"``: all valid ones.

    Raises:
        ValueError: ``keep`` is below 2 (one of each class) or above the number of samples.
    """
    if not 2 <= keep <= len(samples):
        raise ValueError(f"keep is {keep}: it must be 2 to {len(samples)}, the number of samples")
    valid = [index for index, sample in enumerate(samples) if not is_infra(sample)]
    if rule.select == "all" or not valid:
        return valid
    total = min(keep, -(-len(valid) * keep // len(samples)))
    if rule.select == "uniform" and not rule.stratified:
        return sorted(int(i) for i in rng.choice(valid, total, replace=False))
    failures = [index for index in valid if samples[index].reward <= 0]
    successes = [index for index in valid if samples[index].reward > 0]
    if rule.select == "topk":
        return _released(samples, failures, successes, total, rule)
    count = len(failures) * total // len(valid)  # floor(|O_neg| / 2) when nothing was lost
    if rule.keep_one and failures and successes and total > 1:
        count = max(count, 1)
    chosen = _draw(np.ones(len(failures)), count, rng)
    weights = np.ones(len(successes))
    if rule.select == "roc":
        weights = 1 / (penalties([samples[index] for index in successes], rule) + rule.epsilon)
    drawn = _draw(weights, total - count, rng)
    return sorted([failures[i] for i in chosen] + [successes[i] for i in drawn])


def _draw(weights: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    """Draw ``count`` indices without replacement, one after another, each in proportion to weight.

    As a race of exponential clocks, which is that distribution exactly (Efraimidis and Spirakis
    2006): with the same random numbers, more weight never loses an index its place.
    """
    finish = rng.exponential(size=len(weights)) / weights
    return [int(index) for index in np.argsort(finish, kind="stable")[:count]]


def _released(
    samples: Sequence[Sample], failures: list[int], successes: list[int], total: int, rule: Rule
) -> list[int]:
    """The released rule: no chance; first failures, least penalised successes, 2 of each class."""
    penalty = dict(zip(successes, penalties([samples[i] for i in successes], rule), strict=True))
    ranked = sorted(successes, key=lambda index: penalty[index])
    size = len(failures) + len(successes)
    bad, good = (round(len(group) * total / size) for group in (failures, successes))
    if bad < MIN_PER_CLASS and good < MIN_PER_CLASS:
        return sorted(failures + successes)
    if bad <= (least := min(MIN_PER_CLASS, len(failures))):
        bad, good = least, total - least
    if good <= (least := min(MIN_PER_CLASS, len(successes))):
        bad, good = total - least, least
    return sorted(ranked[:good] + failures[:bad])
