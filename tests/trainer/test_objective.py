"""Equations 6 and 7, by hand, by finite differences, and however the batch is cut."""

# pyright: basic, reportMissingImports=false

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollyard_trainer.objective import Clip, Normalisation, advantages, policy_loss, token_weights

KINDS: list[Normalisation] = ["group_token", "batch_token", "seq_mean", "const"]


def test_advantages_are_equation_7() -> None:
    found = advantages([1, 0, 0, 1])
    assert np.allclose(found, np.array([1, -1, -1, 1]) * 0.5 / np.sqrt(1 / 3), atol=1e-5)
    assert np.allclose(advantages([1, 1]), 0)
    assert np.allclose(advantages([1]), 0)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=32))
def test_advantages_sum_to_nothing(rewards: list[float]) -> None:
    assert abs(advantages(rewards).sum()) < 1e-6


def test_the_loss_is_equation_6_by_hand() -> None:
    # Two prompts. The first: rollouts of 2 and 1 written tokens; the second: 1 and 3.
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    groups = torch.tensor([0, 0, 1, 1])
    gain = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64)
    ratio = torch.tensor(
        [[1.0, 1.5, 9.0], [9.0, 0.5, 9.0], [1.2, 9.0, 9.0], [1.1, 0.7, 2.0]], dtype=torch.float64
    )
    loss = policy_loss(ratio.log(), torch.zeros(4, 3), gain, token_weights(mask, groups))
    # min(r A, clip(r, 0.8, 1.28) A), summed over the prompt's tokens, over their number.
    first = (1.0 + 1.28 + -0.8) / 3
    second = (2 * 1.2 + -2 * 1.1 + -2 * 0.8 + -2 * 2.0) / 4
    assert float(loss.value) == pytest.approx(-(first + second) / 2, rel=1e-6)
    assert loss.clipped == pytest.approx(3 / 7)  # 1.5 up, 0.5 and 0.7 down


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("group_token", [1 / 3 / 2, 1 / 3 / 2, 1 / 4 / 2, 1 / 4 / 2]),
        ("batch_token", [1 / 7] * 4),
        ("seq_mean", [1 / 2 / 2 / 2, 1 / 2 / 2, 1 / 2 / 2, 1 / 3 / 2 / 2]),
        ("const", [1 / 40] * 4),
    ],
)
def test_normalisations_by_hand(kind: Normalisation, expected: list[float]) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    weights = token_weights(mask, torch.tensor([5, 5, 8, 8]), kind, max_tokens=10)
    assert torch.allclose(weights, mask * torch.tensor(expected)[:, None])


def test_const_needs_its_constant() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        token_weights(torch.ones(1, 1), torch.zeros(1), "const")


def batch(rows: int, length: int, seed: int) -> tuple[torch.Tensor, ...]:
    chance = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=chance) < 0.6
    mask[:, 0] = True
    groups = torch.arange(rows) // 2
    old = -torch.rand(rows, length, generator=chance, dtype=torch.float64)
    now = old + 0.5 * torch.randn(rows, length, generator=chance, dtype=torch.float64)
    gain = torch.randn(rows, generator=chance, dtype=torch.float64)
    return mask, groups, old, now, gain


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(2, 9), seed=st.integers(0, 1000), cut=st.integers(1, 9))
def test_however_it_is_cut_and_padded(kind: Normalisation, rows: int, seed: int, cut: int) -> None:
    mask, groups, old, now, gain = batch(rows, 5, seed)
    whole = policy_loss(now, old, gain, token_weights(mask, groups, kind, max_tokens=5)).value
    padded = [torch.nn.functional.pad(t, (0, 4)) for t in (mask, old, now)]
    weights = token_weights(padded[0], groups, kind, max_tokens=5)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    parts = [
        policy_loss(padded[2][part], padded[1][part], gain[part], weights[part]).value
        for part in order.split(cut)
    ]
    assert float(torch.stack(parts).sum()) == pytest.approx(float(whole), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_tool_tokens_have_no_gradient_by_finite_differences(kind: Normalisation) -> None:
    mask, groups, old, now, gain = batch(4, 5, 3)
    weights = token_weights(mask, groups, kind, max_tokens=5)
    now.requires_grad_()
    policy_loss(now, old, gain, weights).value.backward()
    assert now.grad is not None
    step = 1e-6
    for row in range(4):
        for column in range(5):
            moved = [now.detach().clone() for _ in range(2)]
            moved[0][row, column] += step
            moved[1][row, column] -= step
            up, down = (float(policy_loss(m, old, gain, weights).value) for m in moved)
            slope = (up - down) / (2 * step)
            assert slope == pytest.approx(float(now.grad[row, column]), abs=1e-6)
            if not mask[row, column]:
                assert slope == 0
                assert now.grad[row, column] == 0


def test_an_on_policy_batch_clips_nothing_and_its_gradient_is_the_policy_gradient() -> None:
    mask, groups, old, _, gain = batch(4, 5, 1)
    weights = token_weights(mask, groups)
    now = old.clone().requires_grad_()
    loss = policy_loss(now, old, gain, weights)
    loss.value.backward()
    assert loss.clipped == 0
    assert now.grad is not None
    assert torch.allclose(now.grad, -(weights * gain[:, None]).to(now.grad.dtype))


def test_clip_higher_leaves_rare_tokens_more_room() -> None:
    now = torch.tensor([[1.25]]).log()
    one = torch.ones(1)
    higher = policy_loss(now, torch.zeros(1, 1), one, torch.ones(1, 1), Clip(0.2, 0.28))
    plain = policy_loss(now, torch.zeros(1, 1), one, torch.ones(1, 1), Clip(0.2, 0.2))
    assert float(higher.value) == pytest.approx(-1.25)
    assert float(plain.value) == pytest.approx(-1.2)


def test_garbage_at_tool_tokens_is_harmless() -> None:
    mask = torch.tensor([[True, False]])
    now = torch.tensor([[0.0, 1e30]])
    loss = policy_loss(now, torch.zeros(1, 2), torch.ones(1), token_weights(mask, torch.zeros(1)))
    assert torch.isfinite(loss.value)
