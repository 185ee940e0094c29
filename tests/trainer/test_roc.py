"""Selection: exactly the paper's distribution, exactly the released code's rule."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard_trainer.roc import (
    CallStatus,
    Rule,
    Sample,
    ToolCall,
    error_penalty,
    format_penalty,
    penalties,
    select,
)

TURN = "<|im_start|>assistant\n"
STATUSES: list[CallStatus] = ["ok", "parse_error", "exec_error", "timeout", "oom", "output_limit"]


def rollout(
    reward: float, *statuses: CallStatus, answers: int = 1, turns: int = 0, text: str = ""
) -> Sample:
    calls = tuple(ToolCall(status) for status in statuses)
    return Sample(reward, text, turns or len(statuses) + 1, answers, calls)


@st.composite
def any_rollout(draw: st.DrawFn) -> Sample:
    statuses = draw(st.lists(st.sampled_from(STATUSES), max_size=4))
    reward, answers = draw(st.sampled_from([0.0, 1.0])), draw(st.integers(0, 5))
    return rollout(reward, *statuses, answers=answers)


rollouts = any_rollout()
groups = st.integers(2, 12).flatmap(lambda g: st.lists(rollouts, min_size=2 * g, max_size=2 * g))
seeds = st.integers(0, 2**32 - 1)


def inclusion(weights: Sequence[float], count: int) -> list[float]:
    """Probability of each index to be among ``count`` successive draws, by enumeration."""
    chances = [0.0] * len(weights)
    for order in permutations(range(len(weights)), count):
        chance, left = 1.0, sum(weights)
        for index in order:
            chance *= weights[index] / left
            left -= weights[index]
        for index in order:
            chances[index] += chance
    return chances


def frequencies(group: list[Sample], keep: int, rule: Rule, draws: int = 20_000) -> np.ndarray:
    rng, counts = np.random.default_rng(7), np.zeros(len(group))
    for _ in range(draws):
        counts[select(group, keep, rng, rule)] += 1
    return counts / draws


@pytest.mark.parametrize(
    ("sample", "penalty"),
    [
        (rollout(1), 0.5),  # no call: "to encourage tool usage"
        (rollout(1, "ok", "ok"), 0.0),
        (rollout(1, "ok", "parse_error"), 0.5),
        (rollout(1, "exec_error", "timeout", "oom", "ok"), 0.75),
        (rollout(1, "output_limit", "ok"), 0.0),  # it ran, and its output was cut
    ],
)
def test_error_penalty_is_equation_4(sample: Sample, penalty: float) -> None:
    assert error_penalty(sample) == penalty


@pytest.mark.parametrize(
    ("answers", "turns", "penalty"),
    [(0, 3, 1.0), (1, 1, 0.0), (1, 4, 0.0), (2, 4, 0.25), (9, 2, 1.0)],
)
def test_format_penalty_is_equation_5(answers: int, turns: int, penalty: float) -> None:
    assert format_penalty(rollout(1, answers=answers, turns=turns)) == penalty


@pytest.mark.parametrize(
    ("status", "observation", "by_status", "by_substring"),
    [
        ("parse_error", "Failed to decode tool call", 1.0, 0.0),
        ("timeout", "reason: worker_timeout", 1.0, 0.0),
        ("ok", "standard error 0.03", 0.0, 1.0),
        ("infra_error", "internal_error", 0.0, 1.0),
    ],
)
def test_substring_mode_has_the_released_faults(
    status: CallStatus, observation: str, by_status: float, by_substring: float
) -> None:
    sample = Sample(1, "", 2, 1, (ToolCall(status, observation),))
    assert error_penalty(sample) == by_status
    assert error_penalty(sample, source="substring") == by_substring


@pytest.mark.parametrize(
    ("text", "answers", "turns", "paper", "code"),
    [
        ("<answer>1</answer><|im_end|>", 1, 1, 0.0, 1.0),
        (f"x<|im_end|>{TURN}<answer>1</answer><|im_end|>", 1, 2, 0.0, 0.0),
        (f"<answer>1</answer><|im_end|>{TURN}<answer>1</answer><|im_end|>", 2, 2, 0.5, 1.0),
        (f"x<|im_end|>{TURN}<answer>1</answer>", 1, 2, 0.0, 1.0),
        (f"x<|im_end|>{TURN}<answer>1<|im_end|>", 1, 2, 0.0, 1.0),
    ],
)
def test_turns_code_counts_as_the_released_code(
    text: str, answers: int, turns: int, paper: float, code: float
) -> None:
    sample = Sample(1, text, turns, answers)
    assert format_penalty(sample) == paper
    assert format_penalty(sample, turns="code") == code


@given(groups, seeds)
def test_half_of_each_class_is_kept(group: list[Sample], seed: int) -> None:
    keep = len(group) // 2
    chosen = select(group, keep, np.random.default_rng(seed), Rule(keep_one=False))
    failures = sum(sample.reward == 0 for sample in group)
    assert len(chosen) == len(set(chosen)) == keep
    assert sum(group[i].reward == 0 for i in chosen) == failures // 2
    assert sum(group[i].reward == 1 for i in chosen) == -(-(len(group) - failures) // 2)


@given(groups, seeds)
def test_a_lone_failure_stays_and_its_group_keeps_a_signal(group: list[Sample], seed: int) -> None:
    keep = len(group) // 2
    chosen = select(group, keep, np.random.default_rng(seed))
    rewards = {sample.reward for sample in group}
    assert {group[i].reward for i in chosen} == rewards
    failures = sum(sample.reward == 0 for sample in group)
    least = min(1, failures) if len(rewards) == 2 else 0
    assert sum(group[i].reward == 0 for i in chosen) == max(failures // 2, least)


def test_the_papers_floor_loses_a_group_with_one_failure() -> None:
    group = [rollout(0, "ok")] + [rollout(1, "ok")] * 7
    chosen = select(group, 4, np.random.default_rng(0), Rule(keep_one=False))
    assert {group[i].reward for i in chosen} == {1}


@given(groups, seeds, st.sampled_from(["roc", "uniform", "topk", "all"]))
def test_the_same_seed_chooses_the_same(group: list[Sample], seed: int, how: str) -> None:
    rule = Rule(select=how)  # pyright: ignore[reportArgumentType]
    first, second = (
        select(group, len(group) // 2, np.random.default_rng(seed), rule) for _ in range(2)
    )
    assert first == second == sorted(first)


@given(groups, seeds, st.data())
def test_a_rollout_never_loses_its_place_by_getting_better(
    group: list[Sample], seed: int, data: st.DataObject
) -> None:
    keep = len(group) // 2
    chosen = select(group, keep, np.random.default_rng(seed))
    winners = [index for index in chosen if group[index].reward == 1]
    if not winners:
        return
    index = data.draw(st.sampled_from(winners))
    better = [*group]
    better[index] = rollout(1, "ok")
    assert penalties([better[index]])[0] <= penalties([group[index]])[0]
    assert index in select(better, keep, np.random.default_rng(seed))


def test_successes_are_included_exactly_as_often_as_the_paper_says() -> None:
    good = [
        rollout(1, "ok"),
        rollout(1, "ok", "exec_error"),
        rollout(1, "timeout"),
        rollout(1),
        rollout(1, "ok", answers=2),
    ]
    group = [rollout(0, "ok"), rollout(0, "exec_error"), rollout(0), *good]
    weights = [1 / (p + 0.1) for p in (0.0, 0.5, 1.0, 0.5, 0.5)]
    expected = [1 / 3] * 3 + inclusion(weights, 3)
    seen = frequencies(group, 4, Rule())
    # Five standard errors of a share of 20,000 draws.
    assert np.abs(seen - expected).max() < 5 * 0.5 / np.sqrt(20_000)
    assert seen[3] > seen[4] > seen[5]


def test_failures_are_drawn_without_regard_to_penalties() -> None:
    group = [rollout(0, "ok"), rollout(0, "exec_error"), rollout(0, answers=0), rollout(0, "oom")]
    group += [rollout(1, "ok")] * 4
    seen = frequencies(group, 4, Rule(), draws=8000)
    assert np.abs(seen[:4] - 0.5).max() < 5 * 0.5 / np.sqrt(8000)


@pytest.mark.parametrize(("epsilon", "first"), [(1e-9, 1.0), (1e9, 0.5)])
def test_epsilon_goes_from_best_first_to_uniform(epsilon: float, first: float) -> None:
    group = [rollout(1, "ok"), *[rollout(1, "exec_error")] * 3, *[rollout(0, "ok")] * 4]
    seen = frequencies(group, 4, Rule(epsilon=epsilon), draws=8000)
    assert abs(seen[0] - first) < 5 * 0.5 / np.sqrt(8000)


def test_uniform_stratified_is_the_control_and_unstratified_is_not() -> None:
    group = [rollout(1, "ok"), rollout(1, "exec_error"), rollout(0, "ok"), rollout(0, "oom")]
    for rule in (Rule(select="uniform"), Rule(select="uniform", stratified=False)):
        seen = frequencies(group, 2, rule, draws=8000)
        assert np.abs(seen - 0.5).max() < 5 * 0.5 / np.sqrt(8000)
    rng = np.random.default_rng(1)
    shares: dict[bool, Counter[float]] = {}
    for stratified in (True, False):
        rule = Rule(select="uniform", stratified=stratified)
        drawn = [select(group, 2, rng, rule) for _ in range(500)]
        shares[stratified] = Counter(sum(group[i].reward for i in chosen) for chosen in drawn)
    assert set(shares[True]) == {1.0}
    assert set(shares[False]) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("use", ["use_error", "use_format"])
def test_each_penalty_can_be_left_out(use: str) -> None:
    sample = rollout(1, "exec_error", answers=0)
    rule = Rule(**{use: False})  # pyright: ignore[reportArgumentType]
    assert penalties([sample])[0] == 2.0
    assert penalties([sample], rule)[0] == 1.0


def test_rollouts_that_the_service_failed_leave_before_selection() -> None:
    group = [rollout(1, "infra_error"), rollout(0, "infra_error")]
    group += [rollout(1, "ok")] * 3 + [rollout(0, "ok")] * 3
    for seed in range(50):
        chosen = select(group, 4, np.random.default_rng(seed))
        assert not {0, 1} & set(chosen)
        assert len(chosen) == 3  # half of six
    assert select(group, 4, np.random.default_rng(0), Rule(select="all")) == [2, 3, 4, 5, 6, 7]
    everything = select(
        group, 4, np.random.default_rng(0), Rule(select="topk"), is_infra=lambda _: False
    )
    assert 1 in everything  # the released code trains on it


def test_nothing_is_left_when_the_service_failed_all() -> None:
    assert select([rollout(0, "infra_error")] * 4, 2, np.random.default_rng(0)) == []


def test_topk_takes_the_first_failures_and_the_least_penalised_successes() -> None:
    group = [rollout(0, "ok")] * 6
    group += [rollout(1, "exec_error"), rollout(1, "ok"), *[rollout(1, "ok", "oom")] * 8]
    chosen = select(group, 8, np.random.default_rng(0), Rule(select="topk"))
    assert chosen == [0, 1, 2, 7, 8, 9, 10, 11]  # ties in order; not 6, the worst


@pytest.mark.parametrize("failures", range(1, 32))
def test_topk_keeps_two_of_a_rare_class(failures: int) -> None:
    group = [rollout(0, "ok")] * failures + [rollout(1, "ok")] * (32 - failures)
    chosen = select(group, 16, np.random.default_rng(0), Rule(select="topk"))
    bad = sum(group[i].reward == 0 for i in chosen)
    assert len(chosen) == 16
    assert bad >= min(2, failures)
    assert 16 - bad >= min(2, 32 - failures)


@pytest.mark.parametrize("keep", [1, 9])
def test_an_impossible_size_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match=f"keep is {keep}"):
        select([rollout(1, "ok")] * 8, keep, np.random.default_rng(0))


def test_epsilon_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="epsilon"):
        Rule(epsilon=0)
