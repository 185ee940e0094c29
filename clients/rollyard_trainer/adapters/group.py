"""Selection in one prompt's group, for trainers that are not ours."""

from collections.abc import Sequence

import numpy as np

from rollyard_trainer import roc


def select(
    samples: Sequence[roc.Sample | None], keep: int, rng: np.random.Generator,
    rule: roc.Rule = roc.PAPER,
) -> list[int]:  # fmt: skip
    """Indices of the rollouts to train on; none when all rewards are equal: no signal.

    Args:
        samples: The 2G rollouts of one prompt; None, or one with a call that the service failed,
            is left out first.
        keep: G; of what is left, the same share.
    """
    places = [i for i, one in enumerate(samples) if one is not None and not one.is_infra]
    valid = [one for one in samples if one is not None and not one.is_infra]
    if len({one.reward for one in valid}) < 2:
        return []
    count = max(2, min(keep, -(-len(valid) * keep // len(samples))))
    return [places[index] for index in roc.select(valid, count, rng, rule)]
