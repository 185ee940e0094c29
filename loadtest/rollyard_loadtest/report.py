"""One HTML file with everything in it: figures, charts, and what they are of."""

import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

from rollyard_loadtest import charts
from rollyard_loadtest.figures import BenchFigures, StageFigures
from rollyard_loadtest.ratios import Ratios, ratios
from rollyard_loadtest.target import SERVERS
from rollyard_loadtest.view import costs, duration, warnings

_PAGE = Template(Path(__file__).with_name("report.html").read_text())
_NATIVE = ("sdk", "http")


def write_html(figures: BenchFigures, path: Path) -> None:
    """Write the report.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(page(figures))


def page(figures: BenchFigures) -> str:
    """The whole page; it loads nothing from anywhere."""
    scenario = figures.scenario
    return _PAGE.substitute(
        title=_text(scenario["title"]),
        name=_text(scenario["name"]),
        description=re.sub("`(.+?)`", r"<code>\1</code>", _text(scenario["description"].strip())),
        verdict=_verdict(figures),
        cards=_cards(figures),
        body="\n".join(_sections(figures)),
        facts=_facts(figures),
        configuration=_text(json.dumps(_configuration(figures), indent=2, ensure_ascii=False)),
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _configuration(figures: BenchFigures) -> dict[str, object]:
    return {
        name: value
        for name, value in figures.scenario.items()
        if name not in ("title", "description") and value is not None
    }


def _verdict(figures: BenchFigures) -> str:
    wrong = sum(stage.wrong for stage in figures.stages)
    lost = sum(stage.lost for stage in figures.stages)
    if not wrong and not lost:
        answers = sum(stage.good for stage in figures.stages)
        return f'<p class="verdict good">All {answers:,} judged answers right, none lost</p>'
    said = ", ".join(f"{n:,} {what}" for n, what in ((wrong, "wrong"), (lost, "lost")) if n)
    return f'<p class="verdict bad">{said}</p>'


def _cards(figures: BenchFigures) -> str:
    if figures.rounds:
        return "".join(
            _card(f"runs/s against {_text(SERVERS[r.peer])}", f"{_ratio(r.rate)} ×")  # noqa: RUF001
            for r in ratios(figures)
            if r.phase == "closed loop"
        )
    best = max(figures.stages, key=lambda stage: stage.goodput_per_s)
    rate, at = best.goodput_per_s, "" if len(figures.stages) == 1 else " at that rate"
    cards = [
        ("good runs/s" if len(figures.stages) == 1 else "best good runs/s",
         f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"),
        (f"p50{at}", duration(best.p50_s)),
        (f"p99{at}", duration(best.p99_s)),
        ("wrong", f"{sum(s.wrong for s in figures.stages):,}"),
        ("lost", f"{sum(s.lost for s in figures.stages):,}"),
        ("refused", f"{sum(s.refused for s in figures.stages):,}"),
    ]  # fmt: skip
    return "".join(_card(name, value) for name, value in cards)


def _card(name: str, value: str) -> str:
    return f'<div class="card"><b>{value}</b><span>{name}</span></div>'


def _sections(figures: BenchFigures) -> list[str]:
    found: list[str] = []
    several = len({stage.target for stage in figures.stages}) > 1
    notes = [
        f"{SERVERS[stage.target]}, {text}" if several else text
        for stage in figures.stages
        for text in warnings(stage)
    ]
    if figures.null_workers:
        notes.insert(0, "Null workers: no program was run. These are the figures of gateway and "
                     "queue alone.")  # fmt: skip
    if notes:
        found.append(f'<ul class="notes">{"".join(f"<li>{_text(n)}</li>" for n in notes)}</ul>')
    if figures.goals:
        found.append(_goals(figures))
    if figures.rounds:
        return [*found, *_comparison(figures)]
    if len(figures.stages) == 1:
        return [*found, *_single(figures.stages[0])]
    return [*found, *_many(figures)]


def _goals(figures: BenchFigures) -> str:
    rows = [
        [goal.name, f"{goal.wanted:g}", "–" if goal.got is None else f"{goal.got:.3g}",  # noqa: RUF001
         f'<span class="{"good" if goal.met else "bad"}">{"met" if goal.met else "missed"}</span>']
        for goal in figures.goals
    ]  # fmt: skip
    return _section("Goals", _table(["goal", "wanted", "got", ""], rows))


def _single(stage: StageFigures) -> list[str]:
    return [
        _section("Latency", charts.curves([stage], [stage.name]) + _latency_table([stage])),
        _section("Over time", charts.over_time(stage)),
        _section("Outcomes", charts.outcomes(stage) + _counts_table([stage]) + _examples(stage)),
        _section("By kind of program", _kinds(stage)) if stage.kinds else "",
        _section("What a run costs", charts.costs(stage) + _memory(stage)),
    ]


def _many(figures: BenchFigures) -> list[str]:
    stages = list(figures.stages)
    swept: dict[str, object] = figures.scenario["sweep"] or {}
    parameter = swept.get("parameter")
    found: list[str] = []
    if parameter == "in_flight":
        found.append(_section("From few to many in flight", charts.sweep(figures)))
    else:
        capacity = stages[0].goodput_per_s if parameter == "of_capacity" else None
        offered = stages[1:] if parameter == "of_capacity" else stages
        found.append(_section("Goodput and offered load", charts.goodput(offered, capacity)))
    found += [
        _section("All stages", _latency_table(stages) + _counts_table(stages)),
        _section("Latency", charts.curves(stages, [stage.name for stage in stages])),
        _section("What a run costs", _costs_table(stages)),
    ]
    for stage in stages:
        found.append(
            f"<details><summary>{_text(stage.name)}, over time</summary>"
            f"{charts.over_time(stage)}{_examples(stage)}</details>"
        )
    return found


def _comparison(figures: BenchFigures) -> list[str]:
    found = ratios(figures)
    blocks: dict[str, list[StageFigures]] = {}
    for stage in figures.stages:
        if stage.name.startswith("closed loop"):
            blocks.setdefault(stage.target, []).append(stage)
    rates = {
        SERVERS[target]: [stage.goodput_per_s for stage in stages]
        for target, stages in blocks.items()
    }
    parts = [_section("Side by side", charts.side_by_side(rates) + _ratio_table(found))]
    for phase in dict.fromkeys(stage.name.partition(",")[0] for stage in figures.stages):
        stages = [s for s in figures.stages if s.name.startswith(phase)]
        last = {SERVERS[stage.target]: stage for stage in stages}
        curves = charts.curves(list(last.values()), list(last))
        parts.append(_section(f"Latency, {phase} (last round)", curves))
    parts.append(
        _section("All blocks", _latency_table(figures.stages, with_target=True)
                 + _counts_table(figures.stages, with_target=True)
                 + "".join(_examples(stage) for stage in figures.stages))
    )  # fmt: skip
    return parts


def _ratio_table(found: Sequence[Ratios]) -> str:
    rows = [
        [_text(SERVERS[r.peer]), r.phase,
         f"{_ratio(r.rate)} ({_ratio(r.rate_range[0])} to {_ratio(r.rate_range[1])})",
         _ratio(r.p50), _ratio(r.p99),
         f"{r.wrong:,}", f"{r.peer_wrong:,}"]
        for r in found
    ]  # fmt: skip
    note = (
        "<p class='note'>Ratio of Rollyard to each: of runs a second, more is better; of latency, "
        "less. The median over the rounds, with their range.</p>"
    )
    return (
        _table(["against", "load", "runs/s", "p50", "p99", "wrong, ours", "wrong, theirs"], rows)
        + note
    )


def _ratio(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"  # noqa: RUF001


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _label(stage: StageFigures, with_target: bool) -> str:
    return _text(f"{SERVERS[stage.target]}: {stage.name}" if with_target else stage.name)


def _latency_table(stages: Sequence[StageFigures], *, with_target: bool = False) -> str:
    shares = list(stages[0].latency_s)
    rows = [
        [_label(s, with_target), f"{s.offered_per_s:,.1f}", f"{s.goodput_per_s:,.1f}",
         *(duration(s.latency_s.get(share)) for share in shares), duration(s.max_s)]
        for s in stages
    ]  # fmt: skip
    head = ["load", "offered/s", "good/s", *(f"p{float(q) * 100:g}" for q in shares), "max"]
    return _table(head, rows)


def _counts_table(stages: Sequence[StageFigures], *, with_target: bool = False) -> str:
    names = ("due", "good", "wrong", "unjudged", "refused", "lost", "retried", "redelivered")
    rows = [[_label(s, with_target), *(f"{getattr(s, name):,}" for name in names)] for s in stages]
    return _table(["load", *names], rows)


def _costs_table(stages: Sequence[StageFigures]) -> str:
    parts = list(dict.fromkeys(part for s in stages for part in s.cpu_ms_per_run))
    rows = [
        [_text(s.name), *(f"{s.cpu_ms_per_run.get(part, 0.0):.3g}" for part in parts),
         f"{s.slow:.2f}" if s.slow else ""]
        for s in stages
    ]  # fmt: skip
    return _table(["CPU ms a run", *parts, "machine slow by"], rows)


def _kinds(stage: StageFigures) -> str:
    rows = [
        [_text(name), f"{kind.runs:,}", f"{kind.wall_ms:.2f}", f"{kind.cpu_ms:.2f}",
         f"{kind.queued_ms:.1f}"]
        for name, kind in stage.kinds.items()
    ]  # fmt: skip
    return _table(["kind", "right answers", "wall ms", "CPU ms", "queued ms"], rows)


def _memory(stage: StageFigures) -> str:
    if not stage.pss_bytes:
        return f"<p class='note'>{_text(costs(stage))}</p>"
    rows = [
        [_text(part), f"{stage.processes.get(part, 0):,}", f"{size / 2**20:,.1f}",
         f"{size / 2**20 / max(1, stage.processes.get(part, 1)):,.2f}"]
        for part, size in stage.pss_bytes.items()
    ]  # fmt: skip
    return _table(["part", "processes", "MiB (PSS) while loaded", "MiB each"], rows)


def _examples(stage: StageFigures) -> str:
    if not stage.examples:
        return ""
    lines = "".join(f"<li><code>{_text(text)}</code></li>" for text in stage.examples)
    return f'<ul class="examples">{lines}</ul>'


def _facts(figures: BenchFigures) -> str:
    about = figures.machine
    facts = [
        ("command", f"<code>{_text(figures.command)}</code>"),
        ("started", _text(figures.started)),
        ("Rollyard", _text(f"{figures.rollyard} {figures.commit}".strip())),
        (
            "machine",
            _text(f"{about.cores} cores of {about.cpu}, {about.memory_bytes / 2**30:.0f} GiB"),
        ),
        ("software", _text(f"Linux {about.kernel}, Python {about.python}")),
        ("load average before", f"{about.load_average:.2f}"),
        ("seed", _text(figures.seed)),
    ]
    return "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts)
