"""The report's charts, each an SVG to stand in a page."""
# matplotlib's own signatures have untyped **kwargs.
# pyright: reportUnknownMemberType=false

import io
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from rollyard_loadtest.figures import BenchFigures, Second, StageFigures
from rollyard_loadtest.histogram import Latencies
from rollyard_loadtest.view import duration

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#db2777",
           "#475569", "#b45309")  # fmt: skip
LEAST_S = 0.1
MANY = 4
"""Curves beyond this need their legend beside the chart."""
GOOD, BAD, GREY = "#059669", "#dc2626", "#9aa5b1"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: the page's font, and small
    "font.family": ["system-ui", "sans-serif"],
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11.5,
    "axes.titleweight": "semibold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
}


def _svg(size: tuple[float, float], draw: Callable[[Figure], None]) -> str:
    # findfont warns of a family that this machine has not; the page's reader may have it.
    logging.getLogger("matplotlib.font_manager").setLevel("ERROR")
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _seconds_axis(axis: Any) -> None:
    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))

    def text(value: float, _: object) -> str:
        return duration(value) if value > 0 else "0"

    axis.set_major_formatter(FuncFormatter(text))
    axis.set_minor_formatter(NullFormatter())


def _thousands(axis: Any) -> None:
    def text(value: float, _: object) -> str:
        return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"

    axis.set_major_formatter(FuncFormatter(text))


def curves(stages: Sequence[StageFigures], labels: Sequence[str]) -> str:
    """Latency by percentile, the axis stretched towards the slowest runs."""

    def draw(figure: Figure) -> None:
        chart = figure.add_subplot()
        highest = 1.0
        for stage, label, colour in zip(stages, labels, COLOURS, strict=False):
            points = Latencies.decoded(stage.histogram).curve() if stage.histogram else []
            xs = [_nines(share) for share, _ in points[:-1]]
            chart.plot(xs, [seconds for _, seconds in points[:-1]], color=colour, label=label)
            highest = max([highest, *xs])
        chart.set_yscale("log")
        _seconds_axis(chart.yaxis)
        shares = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)
        ticks = [q for q in shares if _nines(q) <= highest + 0.1]
        chart.set_xticks([_nines(q) for q in ticks], [f"{q * 100:g}%" for q in ticks])
        chart.set_xlabel("share of the runs that were answered within …")
        chart.set_title("Latency, from the moment a run was due")
        if len(stages) > MANY:
            chart.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        elif len(stages) > 1:
            chart.legend(loc="upper left")

    return _svg((7.2, 3.6), draw)


def _nines(share: float) -> float:
    return -math.log10(max(1e-9, 1 - share))


def over_time(stage: StageFigures) -> str:
    """Rate, latency and runs in flight, second by second; grey is the warm-up."""
    seconds = [second for second in stage.seconds if _whole(second, stage.seconds)]
    at = [second.at_s for second in seconds]

    def draw(figure: Figure) -> None:
        rates, tails, flight = figure.subplots(3, 1, sharex=True, height_ratios=[1.2, 1.2, 0.8])
        rates.stackplot(
            at,
            *_rates(seconds),
            labels=["right answers", "refused", "unjudged", "wrong or lost"],
            colors=[GOOD, GREY, COLOURS[1], BAD], alpha=0.85,
        )  # fmt: skip
        rates.set_title("Answers a second")
        handles, labels = rates.get_legend_handles_labels()
        there = [name for name, count in zip(labels, _totals(seconds), strict=True) if count]
        if len(there) > 1:
            kept = [h for h, name in zip(handles, labels, strict=True) if name in there]
            rates.legend(kept, there, loc="upper right", ncols=len(there))
        _thousands(rates.yaxis)
        tails.plot(at, [_or_nan(s.p50_s) for s in seconds], ".-", color=COLOURS[0], label="p50")
        tails.plot(at, [_or_nan(s.p99_s) for s in seconds], ".-", color=COLOURS[1], label="p99")
        tails.set_title("Latency of what came in at that time")
        tails.legend(loc="upper right", ncols=2)
        tails.set_ylim(bottom=0)
        _seconds_axis(tails.yaxis)
        flight.plot(at, [s.in_flight for s in seconds], color=COLOURS[3])
        flight.set_title("In flight")
        flight.set_ylim(bottom=0)
        flight.set_xlabel("seconds since the load began")
        _thousands(flight.yaxis)
        warmup_s = 0.0 if stage.load["arrivals"] == "burst" else stage.load["warmup_s"]
        for chart in (rates, tails, flight):
            chart.axvspan(0, warmup_s, color="#f0f2f5", zorder=0)

    return _svg((7.2, 5.6), draw)


def _rates(seconds: Sequence[Second]) -> list[list[float]]:
    return [
        [s.good / s.during_s for s in seconds],
        [s.refused / s.during_s for s in seconds],
        [s.unjudged / s.during_s for s in seconds],
        [(s.wrong + s.lost) / s.during_s for s in seconds],
    ]


def _totals(seconds: Sequence[Second]) -> list[int]:
    return [
        sum(s.good for s in seconds),
        sum(s.refused for s in seconds),
        sum(s.unjudged for s in seconds),
        sum(s.wrong + s.lost for s in seconds),
    ]


def _whole(second: Second, seconds: Sequence[Second]) -> bool:
    """The last one may be a fraction: its counts are no rate."""
    return second is not seconds[-1] or len(seconds) < 3 or second.during_s > LEAST_S


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def outcomes(stage: StageFigures) -> str:
    """How the runs ended, and what was not answered."""
    counts = dict(sorted(stage.outcomes.items(), key=lambda item: -item[1]))
    counts |= {name: n for name in ("refused", "lost") if (n := getattr(stage, name))}

    def draw(figure: Figure) -> None:
        chart = figure.add_subplot()
        names = list(counts)[::-1]
        colours = [{"ok": GOOD, "lost": BAD, "refused": GREY}.get(n, COLOURS[0]) for n in names]
        bars = chart.barh(names, [max(counts[n], 0.6) for n in names], color=colours, height=0.62)
        chart.bar_label(bars, [f"{counts[n]:,}" for n in names], padding=4, color=INK)
        chart.set_xscale("log")
        chart.set_xlim(0.5, max(counts.values(), default=1) * 6)
        chart.grid(visible=False, axis="y")
        _thousands(chart.xaxis)
        chart.xaxis.set_minor_formatter(NullFormatter())
        chart.set_title("How runs ended (logarithmic)")

    return _svg((7.2, 0.9 + 0.34 * max(1, len(counts))), draw)


def costs(stage: StageFigures) -> str:
    """CPU of each part a run, as one bar."""
    parts = {name: ms for name, ms in stage.cpu_ms_per_run.items() if ms > 0}

    def draw(figure: Figure) -> None:
        chart = figure.add_subplot()
        left = 0.0
        for (name, ms), colour in zip(parts.items(), COLOURS, strict=False):
            label = f"{name} {ms:.3g} ms"
            chart.barh(["CPU"], [ms], left=left, color=colour, label=label, height=0.5)
            left += ms
        chart.set_yticks([])
        chart.grid(visible=False, axis="y")
        chart.set_xlabel("CPU milliseconds a run, all cores together")
        chart.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)

    return _svg((7.2, 1.9), draw)


def sweep(figures: BenchFigures) -> str:
    """Goodput and latency over the runs in flight."""
    stages = figures.stages
    xs = [stage.load["in_flight"] for stage in stages]

    def draw(figure: Figure) -> None:
        rate, tail = figure.subplots(1, 2)
        rate.plot(xs, [s.goodput_per_s for s in stages], "o-", color=GOOD)
        rate.set_title("Right answers a second")
        rate.set_ylim(bottom=0)
        _thousands(rate.yaxis)
        _latencies(tail, xs, stages)
        for chart in (rate, tail):
            chart.set_xscale("log")
            chart.set_xlabel("runs in flight")
            _thousands(chart.xaxis)
            chart.xaxis.set_minor_formatter(NullFormatter())

    return _svg((9.6, 3.6), draw)


def _latencies(chart: Axes, xs: Sequence[float], stages: Sequence[StageFigures]) -> None:
    for quantile, colour in (("0.5", COLOURS[0]), ("0.99", COLOURS[1])):
        ys = [_or_nan(s.latency_s.get(quantile)) for s in stages]
        chart.plot(xs, ys, "o-", color=colour, label=f"p{float(quantile) * 100:g}")
    chart.set_yscale("log")
    _seconds_axis(chart.yaxis)
    chart.set_title("Latency")
    chart.legend(loc="upper left")


def goodput(stages: Sequence[StageFigures], capacity: float | None) -> str:
    """Goodput, refusals and latency over the offered load."""
    xs = [s.offered_per_s for s in stages]

    def draw(figure: Figure) -> None:
        rate, tail = figure.subplots(1, 2)
        most = max(xs)
        rate.plot([0, most], [0, most], "--", color=GREY, linewidth=1, label="all that is offered")
        if capacity is not None:
            label = "capacity, measured first"
            rate.axhline(capacity, color=COLOURS[3], linewidth=1, linestyle=":", label=label)
        rate.plot(xs, [s.goodput_per_s for s in stages], "o-", color=GOOD, label="right answers")
        turned_away = [(s.refused + s.unjudged) / s.elapsed_s for s in stages]
        rate.plot(xs, turned_away, "o-", color=COLOURS[1], linewidth=1.2, markersize=4,
                  label="refused or expired")  # fmt: skip
        rate.set_title("A second")
        rate.set_xlim(left=0)
        rate.set_ylim(bottom=0)
        rate.legend(loc="upper left")
        _thousands(rate.yaxis)
        _latencies(tail, xs, stages)
        tail.set_title("Latency of right answers")
        tail.set_xlim(left=0)
        for chart in (rate, tail):
            chart.set_xlabel("runs offered a second")
            _thousands(chart.xaxis)

    return _svg((9.6, 3.8), draw)


def side_by_side(rates: dict[str, list[float]]) -> str:
    """Runs a second of each server: the bar is the median, the dots its rounds."""

    def draw(figure: Figure) -> None:
        chart = figure.add_subplot()
        names = list(rates)[::-1]
        medians = [sorted(rates[name])[len(rates[name]) // 2] for name in names]
        colours = [COLOURS[list(rates).index(name) % len(COLOURS)] for name in names]
        bars = chart.barh(names, medians, color=colours, height=0.55, alpha=0.85)
        for place, name in enumerate(names):
            chart.plot(rates[name], [place] * len(rates[name]), "o", color=INK, markersize=4)
        chart.bar_label(bars, [f"{value:,.1f}" for value in medians], padding=14, color=INK)
        chart.margins(x=0.16)
        chart.grid(visible=False, axis="y")
        chart.set_title("Right answers a second (bar: median; dots: rounds)")

    return _svg((7.2, 1.0 + 0.5 * len(rates)), draw)
