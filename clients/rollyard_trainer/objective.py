"""Advantages and the clipped objective (paper equations 1, 2, 6 and 7).

No KL term, no entropy term. The loss is a weighted sum over tokens with weights that depend on the
whole batch, so it is the same however the batch is cut into micro-batches, padded or distributed.
"""

# pyright: basic, reportMissingImports=false
# torch is not in the environment of the service, where the type checker runs.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

Normalisation = Literal["group_token", "batch_token", "seq_mean", "const"]


def advantages(rewards: Sequence[float]) -> np.ndarray:
    """(r - mean) / std over one prompt's selected rollouts (equation 7), float64 of shape (G,).

    The standard deviation is the unbiased one plus 1e-6, as in verl and TRL; the paper is silent.
    Rollouts that the selection left out must not be in ``rewards``.
    """
    array = np.asarray(rewards, dtype=np.float64)
    if len(array) < 2:
        return np.zeros(len(array))
    return (array - array.mean()) / (array.std(ddof=1) + 1e-6)


def token_weights(
    mask: torch.Tensor,
    groups: torch.Tensor,
    kind: Normalisation = "group_token",
    *,
    max_tokens: int | None = None,
) -> torch.Tensor:
    """Weight of each token in the loss; 0 where the policy did not write it.

    Args:
        mask: (B, T), true for tokens that the policy wrote.
        groups: (B,) index of each row's prompt.
        kind: ``group_token``: equation 6, one over the tokens of the prompt's selected rollouts,
            averaged over prompts. ``batch_token``: one over the tokens of the batch (DAPO as
            implemented in verl and TRL). ``seq_mean``: equation 1, mean over each rollout, then
            its group. ``const``: one over rows times ``max_tokens`` (Dr. GRPO).
        max_tokens: Longest response allowed; for ``const`` only.

    Raises:
        ValueError: ``const`` without ``max_tokens``.
    """
    written = mask.to(torch.float32)
    lengths = written.sum(1)
    _, index = torch.unique(groups, return_inverse=True)
    count = int(index.max()) + 1
    if kind == "group_token":
        per_group = lengths.new_zeros(count).index_add_(0, index, lengths)
        scale = 1 / per_group.clamp(min=1)[index] / count
    elif kind == "batch_token":
        scale = torch.full_like(lengths, 1 / max(1.0, float(lengths.sum())))
    elif kind == "seq_mean":
        sizes = lengths.new_zeros(count).index_add_(0, index, torch.ones_like(lengths))
        scale = 1 / lengths.clamp(min=1) / sizes[index] / count
    else:
        if max_tokens is None:
            raise ValueError("const needs max_tokens")
        scale = torch.full_like(lengths, 1 / (len(lengths) * max_tokens))
    return written * scale[:, None]


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the probability ratio: clip-higher (DAPO)."""

    low: float = 0.2
    high: float = 0.28


CLIP_HIGHER = Clip()


@dataclass(frozen=True, slots=True)
class Loss:
    """``value`` to minimise, and the share of written tokens whose ratio was clipped."""

    value: torch.Tensor
    clipped: float


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantage: torch.Tensor,
    weights: torch.Tensor,
    clip: Clip = Clip(),
) -> Loss:
    """Minus the clipped objective, summed with ``weights``.

    Args:
        logprobs: (B, T) of the policy that is trained, with gradient.
        old_logprobs: (B, T) of the policy that wrote the tokens.
        advantage: (B,), the same for all tokens of a rollout.
        weights: (B, T) of :func:`token_weights`, for the whole batch or rows of it.
    """
    seen = weights > 0
    ratio = torch.exp(torch.where(seen, logprobs - old_logprobs, torch.zeros_like(logprobs)))
    gain = advantage[:, None].to(ratio.dtype)
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    value = -(weights * torch.minimum(ratio * gain, bounded * gain)).sum()
    clipped = (bounded * gain < ratio * gain) & seen
    return Loss(value, float(clipped.sum()) / max(1, int(seen.sum())))
