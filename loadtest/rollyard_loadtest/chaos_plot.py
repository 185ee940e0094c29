"""The timeline of a chaos run: faults, answers, latency, redeliveries."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from rollyard_loadtest.chaos_report import Report

_COLOURS = {"kill": "C3", "freeze": "C0", "pause": "C9", "roll": "C2"}


def timeline(report: Report, path: Path) -> None:
    """Write four charts above each other, one second a step."""
    figure, charts = pyplot.subplots(
        4, 1, figsize=(14, 10), sharex=True, gridspec_kw={"height_ratios": [2, 2, 2, 1.4]}
    )
    faults, rate, latency, again = charts
    _faults(faults, report)
    seconds = range(int(report.elapsed_s) + 1)
    by_second: dict[int, list[float]] = defaultdict(list)
    delivered_again: dict[int, int] = defaultdict(int)
    infra: dict[int, int] = defaultdict(int)
    for entry in report.answered:
        assert entry.answered_s is not None
        by_second[int(entry.answered_s)].append(entry.answered_s - entry.asked_s)
        delivered_again[int(entry.answered_s)] += entry.attempt > 1
        infra[int(entry.answered_s)] += entry.outcome == "infra_error"
    rate.step(seconds, [len(by_second[s]) for s in seconds], where="post", linewidth=1)
    rate.set_ylabel("answers a second")
    waits = [(s, sorted(by_second[s])) for s in seconds if by_second[s]]
    for share, name in ((0.5, "median"), (0.99, "p99")):
        values = [w[min(len(w) - 1, int(share * len(w)))] for _, w in waits]
        latency.plot([s + 0.5 for s, _ in waits], values, ".-", linewidth=1, label=name)
    latency.set_yscale("log")
    latency.set_ylabel("latency, s")
    latency.legend(loc="upper right")
    again.bar(seconds, [delivered_again[s] for s in seconds], color="C1", align="edge",
              label="answers of a later delivery")  # fmt: skip
    again.bar(seconds, [infra[s] for s in seconds], color="C3", align="edge", label="infra_error")
    again.set_ylabel("a second")
    again.legend(loc="upper right")
    again.set_xlabel("seconds")
    for chart in (rate, latency, again):
        for fault in report.faults:
            colour = _COLOURS[fault.kind.split()[0]]
            chart.axvline(fault.from_s, color=colour, alpha=0.25, linewidth=0.8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)  # pyright: ignore[reportUnknownMemberType]
    pyplot.close(figure)


def _faults(chart: Any, report: Report) -> None:
    parts = sorted({fault.part for fault in report.faults}, reverse=True)
    shown: set[str] = set()
    for fault in report.faults:
        what = fault.kind.split()[0]
        chart.barh(
            parts.index(fault.part), fault.until_s - fault.from_s, left=fault.from_s, height=0.6,
            color=_COLOURS[what], label=None if what in shown else what,
        )  # fmt: skip
        shown.add(what)
    chart.set_yticks(range(len(parts)), parts)
    chart.set_title(
        "faults; a bar ends when the part serves again. "
        + ", ".join(f"{name} {count}" for name, count in report.counts().items()),
        fontsize=8,
    )
    if shown:
        chart.legend(loc="upper right", ncols=4)
