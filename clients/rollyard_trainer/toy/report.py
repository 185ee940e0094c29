"""The page: curves, and paired intervals against the two baselines that matter."""

import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from rollyard_trainer.evals.statistics import Interval, difference, paired
from rollyard_trainer.toy.arms import ARMS, Settings
from rollyard_trainer.toy.run import read_results

BASELINES = ("rand-strat", "grpo-2G")
CURVES = {
    "error_share": "failed share of calls in correct rollouts (paper, fig. 4)",
    "accuracy": "accuracy",
    "format_share": "correct rollouts without exactly one answer",
    "tokens": "tokens written per rollout",
    "calls": "calls per rollout",
    "entropy": "entropy, nats per token",
    "vacuous": "calls that compute nothing",
    "swallowed": "calls that hide exceptions",
}
LEVELS = (0.6, 0.8, 0.9)  # of accuracy, at which error shares are compared
SMOOTHING = 5  # steps

_STYLE = """body{font:15px/1.5 system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .7rem;
text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}
svg{max-width:100%;height:auto}.better{color:#060;font-weight:600}.worse{color:#a00}"""

_CAVEAT = """A policy of 0.1M parameters, a made-up task, error habits that were put in: this page
says how the selection behaves where errors say little about the outcome. Nothing about models of
billions of parameters, or about mathematics, follows from it."""

Rows = dict[str, dict[int, dict[str, Any]]]
Figure = Callable[[dict[str, Any]], float]


def write_report(directory: Path, settings: Settings) -> Path:
    """Write ``report.html``, whose path is returned, and ``curves.png`` from all finished runs of
    these settings.

    Raises:
        ValueError: there are none.
    """
    ordered = rows_of(directory, settings)
    if not ordered:
        raise ValueError(f"{directory} has no finished run of these settings")
    parts = [f"<p>{_CAVEAT}</p>", f"<p>Settings {settings.digest()}: {html.escape(str(settings))}",
             _plot(ordered, directory / "curves.png"), _table(ordered), _forks(ordered),
             _cost(ordered)]  # fmt: skip
    parts += [_against(ordered, baseline) for baseline in BASELINES if baseline in ordered]
    page = directory / "report.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><title>Phrasebook</title><style>{_STYLE}</style>"
        f"<h1>Phrasebook: GRPO-RoC in miniature</h1>{''.join(parts)}"
    )
    return page


def rows_of(directory: Path, settings: Settings) -> Rows:
    """All finished runs of these settings, by arm, in the order of ``ARMS``, and seed."""
    rows: Rows = {}
    for row in read_results(directory, settings):
        rows.setdefault(row["arm"], {})[row["seed"]] = row
    return {name: rows[name] for name in ARMS if name in rows}


def series(row: dict[str, Any], name: str) -> np.ndarray:
    """A curve of one run, a running mean over ``SMOOTHING`` steps; NaN where it is unknown."""
    values = np.array([point.get(name, np.nan) for point in row["curve"]], dtype=float)
    width = min(SMOOTHING, len(values))
    padded = np.pad(values, (width - 1, 0), "edge")
    return known_mean(np.lib.stride_tricks.sliding_window_view(padded, width).T)


def known_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis of what is not NaN; NaN where nothing is."""
    known = np.isfinite(values)
    total, count = np.where(known, values, 0).sum(0), known.sum(0)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def at_accuracy(row: dict[str, Any], level: float, name: str = "error_share") -> float:
    """``name`` where accuracy first reaches ``level``, interpolated; NaN if it never does."""
    accuracy, value = series(row, "accuracy"), series(row, name)
    reached = np.flatnonzero(accuracy >= level)
    if not len(reached):
        return float("nan")
    step = int(reached[0])
    if step == 0:
        return float(value[0])
    part = (level - accuracy[step - 1]) / (accuracy[step] - accuracy[step - 1])
    return float(value[step - 1] + part * (value[step] - value[step - 1]))


def _plot(rows: Rows, picture: Path) -> str:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure: Any
    figure, axes = cast("tuple[Any, Any]", pyplot.subplots(4, 2, figsize=(13, 15)))
    for place, (name, title) in zip(axes.flat, CURVES.items(), strict=True):
        for index, (arm, runs) in enumerate(rows.items()):
            curves = np.array([series(row, name) for row in runs.values()])
            mean = known_mean(curves)
            style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
            place.plot(mean, label=arm, linewidth=2.5 if arm == "roc-full" else 1.2, **style)
        place.set(title=title, xlabel="step")
        place.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg")
    figure.savefig(picture, dpi=70)
    pyplot.close(figure)
    return "<svg" + out.getvalue().partition("<svg")[2]


def scores(runs: dict[int, dict[str, Any]], seeds: list[int]) -> np.ndarray:
    """Test scores (S, P, K): seeds, problems, samples."""
    return np.array([runs[seed]["test_scores"] for seed in seeds], dtype=float)


def _mean(runs: dict[int, dict[str, Any]], name: str) -> str:
    values = np.array([row["test"][name] for row in runs.values()], dtype=float)
    spread = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
    return f"{known_mean(values):.3f}{spread}"


def _table(rows: Rows) -> str:
    names = ("accuracy", "error_share", "error_share_honest", "format_share", "tokens", "calls",
             "vacuous", "swallowed", "truncated")  # fmt: skip
    head = "".join(f"<th>{name}" for name in ("arm", "seeds", *names, "collapsed"))
    body = "".join(
        f"<tr><td title='{html.escape(ARMS[arm].says)}'>{arm}<td>{len(runs)}"
        + "".join(f"<td>{_mean(runs, name)}" for name in names)
        + f"<td>{sum(row['collapsed_at'] is not None for row in runs.values())}"
        for arm, runs in rows.items()
    )
    return (
        "<h2>Test problems, last checkpoint</h2><p>The rule was fixed before: the last step. Mean "
        f"and standard deviation over seeds.</p><table><tr>{head}{body}</table>"
    )


def _against(rows: Rows, baseline: str) -> str:
    shown = figures()
    names = ("arm", "seeds", "test accuracy", *shown)
    head = "".join(f"<th>{name}" for name in names)
    body = ""
    for arm, runs in rows.items():
        seeds = sorted(runs.keys() & rows[baseline].keys())
        if arm == baseline or not seeds:
            continue
        accuracy = difference(scores(runs, seeds), scores(rows[baseline], seeds))
        cells = [_cell(accuracy, more_is_better=True)]
        for figure in shown.values():
            interval, left_out = compared(figure, runs, rows[baseline], seeds)
            cells.append(_cell(interval) + left_out)
        body += f"<tr><td>{arm}<td>{len(seeds)}" + "".join(cells)
    return (
        f"<h2>Difference from {baseline}</h2><p>Paired by seed, 95% bootstrap intervals; accuracy "
        "also over problems and samples. Coloured where the interval is on one side of 0. Many "
        f"intervals: one in twenty is off by chance.</p><table><tr>{head}{body}</table>"
    )


def compared(
    figure: Figure, left: dict[int, dict[str, Any]], right: dict[int, dict[str, Any]],
    seeds: list[int],
) -> tuple[Interval, str]:  # fmt: skip
    """``figure`` of ``left`` less that of ``right``, by seed; and of how many pairs it is, where
    not all have one."""
    ours, theirs = ([figure(runs[seed]) for seed in seeds] for runs in (left, right))
    count = int(np.isfinite(np.array(ours) - np.array(theirs)).sum())
    return paired(ours, theirs), "" if count == len(seeds) else f" ({count} pairs)"


def figures() -> dict[str, Figure]:
    """What is compared, one figure per run."""

    def mean(row: dict[str, Any]) -> float:
        return float(known_mean(series(row, "error_share")))

    def end(name: str) -> Figure:
        return lambda row: float(series(row, name)[-10:].mean())

    def at(level: float) -> Figure:
        return lambda row: at_accuracy(row, level)

    return {
        "error share: mean over steps": mean,
        "last 10 steps": end("error_share"),
        **{f"at accuracy {level}": at(level) for level in LEVELS},
        "format faults, last 10 steps": end("format_share"),
        "tokens, last 10 steps": end("tokens"),
    }


def _cell(interval: Interval, *, more_is_better: bool = False) -> str:
    kind = ""
    if interval.low > 0 or interval.high < 0:
        kind = "better" if (interval.low > 0) == more_is_better else "worse"
    return f"<td class='{kind}'>{interval:+.3f}"


def _forks(rows: Rows) -> str:
    """A bar per forking token of the first seed, as long as its mean entropy."""
    body = ""
    for arm, runs in rows.items():
        forks = next(iter(runs.values()))["forks"][:6]
        bars = "".join(
            f"<code>{html.escape(text.strip()[-24:] or repr(text))}</code> "
            f"<svg width={mean * 60 + 1:.0f} height=9><rect width=100% height=9 fill=#48a></svg> "
            f"{mean:.2f} ({count})<br>"
            for text, mean, count in forks
        )
        body += f"<tr><td>{arm}<td style='text-align:left'>{bars}"
    return (
        "<h2>Forking tokens</h2><p>What the policy wrote at the fifth of positions where its "
        "entropy was highest, after training, first seed: mean entropy in nats, and how often."
        f"</p><table>{body}</table>"
    )


def _cost(rows: Rows) -> str:
    body = "".join(
        f"<tr><td>{arm}" + "".join(
            f"<td>{np.mean([row.get(name, np.nan) for row in runs.values()]):.0f}"
            for name in ("wall_s", "train_s", "cpu_s", "calls", "executed")
        ) + f"<td>{np.mean([sum(p.get('rows', 0) for p in r['curve']) for r in runs.values()]):.0f}"
        for arm, runs in rows.items()
    )  # fmt: skip
    changed = max(row["mismatched"] for runs in rows.values() for row in runs.values())
    return (
        "<h2>Cost per run</h2><table><tr><th>arm<th>wall, s<th>of it training, s<th>CPU of the "
        f"trainer, s<th>tool calls<th>executed<th>rollouts trained on{body}</table><p>Executions "
        f"whose result was another one the second time: {changed}.</p>"
    )
