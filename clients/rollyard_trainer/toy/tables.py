"""The results as Markdown: all arms under one setting, and RoC under several."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from rollyard_trainer.evals.statistics import difference
from rollyard_trainer.toy.arms import Settings
from rollyard_trainer.toy.report import (
    BASELINES,
    Rows,
    compared,
    figures,
    known_mean,
    rows_of,
    scores,
    series,
)
from rollyard_trainer.toy.run import read_settings

ARM = "roc-full"
SHOWN = (
    "error share: mean over steps",
    "at accuracy 0.8",
    "last 10 steps",
    "tokens, last 10 steps",
)

_TEST = {
    "accuracy": "accuracy", "error_share": "error share", "format_share": "format faults",
    "tokens": "tokens", "calls": "calls", "vacuous": "vacuous", "swallowed": "swallowed",
}  # fmt: skip

Setting = tuple[str, Rows]


def read(directories: Sequence[Path]) -> list[Setting]:
    """All settings found, each with a name that says what differs from the defaults.

    Raises:
        ValueError: no directory has runs of ``roc-full`` and of something to compare it with, or
            one has no settings, or those of another version.
    """
    names: dict[str, str] = {}
    merged: dict[str, Rows] = {}
    for directory in directories:
        for settings in read_settings(directory):
            names[settings.digest()] = name_of(settings)
            rows = merged.setdefault(settings.digest(), {})
            for arm, runs in rows_of(directory, settings).items():
                rows.setdefault(arm, {}).update(runs)
    found = [
        (names[digest], rows)
        for digest, rows in merged.items()
        if ARM in rows and any(baseline in rows for baseline in BASELINES)
    ]
    if not found:
        raise ValueError(f"no runs of {ARM} with {' or '.join(BASELINES)} beside it")
    return sorted(found, key=lambda one: one[0] != "defaults")


def name_of(settings: Settings) -> str:
    """``turns 2, first_error 0.1``: what is not as by default."""
    usual = _flat(Settings())
    changed = [f"{name} {value}" for name, value in _flat(settings).items() if value != usual[name]]
    return ", ".join(changed) or "defaults"


def _flat(settings: Settings) -> dict[str, Any]:
    fields = asdict(settings)
    habits = cast("dict[str, Any]", fields.pop("habits"))
    return {**fields, **habits}


def arms(rows: Rows) -> str:
    """Each arm on the test problems, mean and standard deviation over seeds, and how far it is from
    the exact control, paired by seed, with 95% intervals."""
    control, title = BASELINES[0], SHOWN[0]
    head = ("arm", "seeds", *_TEST.values(), f"accuracy less {control}", f"{title}, less {control}")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for arm, runs in rows.items():
        cells = [f"`{arm}`", str(len(runs))]
        for name in _TEST:
            values = np.array([row["test"][name] for row in runs.values()], dtype=float)
            digits = ".1f" if name == "tokens" else ".3f"
            spread = f" ± {np.nanstd(values, ddof=1):{digits}}" if len(values) > 1 else ""
            cells.append(f"{known_mean(values):{digits}}{spread}")
        seeds = sorted(runs.keys() & rows.get(control, {}).keys())
        if arm == control or not seeds:
            cells += ["", ""]
        else:
            cells.append(f"{difference(scores(runs, seeds), scores(rows[control], seeds)):+.3f}")
            interval, left_out = compared(figures()[title], runs, rows[control], seeds)
            cells.append(f"{interval:+.3f}{left_out}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sweep(found: Sequence[Setting]) -> str:
    """Markdown: ``roc-full`` less each baseline, paired by seed, with 95% intervals."""
    head = ("setting", "seeds", "less", "test accuracy", *SHOWN)
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, rows in found:
        for baseline in BASELINES:
            seeds = sorted(rows[ARM].keys() & rows.get(baseline, {}).keys())
            if not seeds:
                continue
            both = rows[ARM], rows[baseline]
            accuracy = difference(*(scores(runs, seeds) for runs in both))
            cells = [f"{accuracy:+.3f}"]
            for title in SHOWN:
                interval, left_out = compared(figures()[title], *both, seeds)
                digits = ".1f" if "tokens" in title else ".3f"
                cells.append(f"{interval:+{digits}}{left_out}")
            lines.append("| " + " | ".join([name, str(len(seeds)), baseline, *cells]) + " |")
    return "\n".join(lines) + "\n"


def picture(found: Sequence[Setting], path: Path) -> None:
    """Error share in correct rollouts over accuracy: a panel for each setting, a line for each run.

    At equal accuracy the lower line has the cleaner calls; where lines end is how far it came.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure, axes = cast(
        "tuple[Any, Any]",
        pyplot.subplots(lines, columns, figsize=(4.6 * columns, 3.6 * lines), squeeze=False),
    )
    for place, (name, rows) in zip(axes.flat, found, strict=False):
        for index, arm in enumerate((ARM, *BASELINES)):
            for number, row in enumerate(rows.get(arm, {}).values()):
                place.plot(series(row, "accuracy"), series(row, "error_share"), color=f"C{index}",
                           alpha=0.6, linewidth=1, label=arm if number == 0 else None)  # fmt: skip
        place.set(title=name, xlabel="accuracy", ylabel="failed share of calls", ylim=(0, None))
        place.grid(alpha=0.3)
        place.legend(fontsize=8)
    for place in np.ravel(axes)[len(found) :]:
        place.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
