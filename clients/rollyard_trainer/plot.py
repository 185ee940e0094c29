"""Curves of a training run, from its ``metrics.jsonl``."""

# pyright: basic

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

_PANELS: dict[str, tuple[str, ...]] = {
    "accuracy": ("accuracy",),
    "tool errors in correct rollouts": ("error_share", "error_share_honest"),
    "format faults, truncated": ("format_share", "truncated"),
    "tokens per rollout": ("tokens",),
    "calls per rollout": ("calls",),
    "share of calls": ("vacuous", "swallowed", "infra"),
    "entropy, nats": ("entropy",),
    "groups": ("groups", "equal", "lost_by_selection"),
    "gradient norm, clipped": ("gradient_norm", "clip_fraction"),
}


def plot(directory: Path) -> Path:
    """Draw ``metrics.png`` beside the metrics, a panel for each thing to watch.

    Raises:
        OSError: there are no metrics.
        ValueError: they have no step yet.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = (directory / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    steps = [row for row in rows if row["event"] == "step"]
    if not steps:
        raise ValueError(f"{directory} has no step yet")
    checked = [row for row in rows if row["event"] == "validation"]
    figure, axes = pyplot.subplots(3, 3, figsize=(13, 9), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, _PANELS.items(), strict=True):
        for name in names:
            known = [(row["total"], row[name]) for row in steps if row.get(name) is not None]
            axis.plot(*zip(*known, strict=True) if known else ([], []), label=name, linewidth=1)
        if title == "accuracy":
            axis.plot([r["total"] for r in checked], [r["accuracy"] for r in checked], "o-",
                      label="validation", markersize=3)  # fmt: skip
        for before, after in pairwise(steps):
            if before["stage"] != after["stage"]:
                axis.axvline(after["total"], color="gray", linewidth=0.5)
        for row in rows:
            if row["event"] == "collapsed":
                axis.axvline(row["total"], color="red", linewidth=1)
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize=7)
    path = directory / "metrics.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path
