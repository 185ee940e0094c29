"""What a chaos run found: the verdict, JSON, and a timeline as PNG and HTML."""

import base64
import html
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollyard_loadtest.chaos_faults import LOSES_LEASES, Done
from rollyard_loadtest.chaos_load import Entry, Ledger

_MAX_SHOWN = 20
MAX_ATTEMPTS = 3
"""Deliveries after which the queue gives a run up (``max_attempts`` of the queue)."""


@dataclass
class Report:
    """One chaos run. ``faults_left`` and ``not_recovered`` are what was wrong at its end."""

    settings: dict[str, Any]
    elapsed_s: float
    ledger: Ledger
    faults: list[Done]
    not_recovered: str = ""
    left: list[str] = field(default_factory=list[str])
    tracebacks: list[str] = field(default_factory=list[str])
    stopped_badly: list[str] = field(default_factory=list[str])
    events: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def answered(self) -> list[Entry]:
        return [entry for entry in self.ledger.entries if entry.answered_s is not None]

    def hits(self, entry: Entry) -> int:
        """Faults within a run's life after which its worker could have been taken for lost."""
        end_s = self.elapsed_s if entry.answered_s is None else entry.answered_s
        return sum(
            fault.kind in LOSES_LEASES and fault.from_s <= end_s and fault.until_s >= entry.asked_s
            for fault in self.faults
        )

    def infra(self) -> list[Entry]:
        return [entry for entry in self.answered if entry.outcome == "infra_error"]

    def unexplained(self) -> list[Entry]:
        """Runs given up as ``infra_error`` that were not hit often enough for it."""
        return [
            entry
            for entry in self.infra()
            if "lost while it ran" not in entry.message
            or entry.attempt < MAX_ATTEMPTS
            or self.hits(entry) < MAX_ATTEMPTS
        ]

    def problems(self) -> list[str]:
        """Everything that must not be; empty: the run passed."""
        found = [
            f"LOST {e.run_id} ({e.kind}, {e.way}): no answer since {e.asked_s:.1f} s"
            for e in self.ledger.open()
        ]
        found += [f"DUPLICATED {text}" for text in self.ledger.duplicated]
        found += [
            f"WRONG {e.run_id} ({e.kind}, {e.way}), asked at {e.asked_s:.1f} s: {e.problem}"
            for e in self.answered
            if e.problem
        ]
        found += [
            f"UNEXPLAINED infra_error of {e.run_id} ({e.kind}) at {e.answered_s:.1f} s, attempt"
            f" {e.attempt}, hit {self.hits(e)} times: {e.message}"
            for e in self.unexplained()
        ]
        found += [f"LEFT {text}" for text in self.left]
        found += [f"LOGGED {text}" for text in self.tracebacks]
        found += [f"STOPPED BADLY {name}" for name in self.stopped_badly]
        if self.not_recovered:
            found.append(f"NOT RECOVERED {self.not_recovered}")
        return found

    def counts(self) -> dict[str, int]:
        """The figures of the verdict."""
        return {
            "asked": len(self.ledger.entries),
            "answered": len(self.answered),
            "lost": len(self.ledger.open()),
            "duplicated": len(self.ledger.duplicated),
            "wrong": sum(bool(entry.problem) for entry in self.answered),
            "infra_error": len(self.infra()),
            "infra_error_unexplained": len(self.unexplained()),
            "delivered_again": sum(entry.attempt > 1 for entry in self.answered),
            "run_anew_after_server_loss": self.ledger.anew,
            "refusals": sum(self.ledger.refusals.values()),
            "faults": len(self.faults),
            "left_over": len(self.left),
        }

    def latencies_s(self) -> list[float]:
        return sorted(e.answered_s - e.asked_s for e in self.answered if e.answered_s is not None)


def text(report: Report) -> str:
    """The summary that is printed."""
    counts = report.counts()
    waits = report.latencies_s() or [0.0]
    p50, p99 = (waits[min(len(waits) - 1, int(q * len(waits)))] for q in (0.5, 0.99))
    faults = Counter(fault.kind for fault in report.faults)
    outcomes = Counter(entry.outcome for entry in report.answered)
    problems = report.problems()
    lines = [
        f"{counts['answered']} of {counts['asked']} answered in {report.elapsed_s:.0f} s, through"
        f" {counts['faults']} faults: " + ", ".join(f"{n} {k}" for k, n in faults.most_common()),
        "",
        "| lost | duplicated | wrong | infra_error, of these unexplained | left over |",
        "|---|---|---|---|---|",
        f"| {counts['lost']} | {counts['duplicated']} | {counts['wrong']} |"
        f" {counts['infra_error']}, {counts['infra_error_unexplained']} | {counts['left_over']} |",
        "",
        f"Latency p50 {p50:.2f} s, p99 {p99:.2f} s, longest {waits[-1]:.2f} s.",
        f"Delivered more than once: {counts['delivered_again']}; run anew because the server forgot"
        f" (seen by a second asker): {counts['run_anew_after_server_loss']}.",
        "Outcomes: " + ", ".join(f"{n} {name}" for name, n in outcomes.most_common()),
        "Calls that had to be made again: "
        + (", ".join(f"{n} {name}" for name, n in report.ledger.refusals.most_common()) or "none"),
    ]
    lines += ["", *problems[:_MAX_SHOWN]]
    if len(problems) > _MAX_SHOWN:
        lines.append(f"… and {len(problems) - _MAX_SHOWN} more (see the JSON)")
    return "\n".join(lines).rstrip() + "\n"


def write(report: Report, prefix: str) -> list[Path]:
    """Write ``prefix.json``, ``.png`` and ``.html``; the paths written.

    Without matplotlib the picture is left out.
    """
    json_path, png_path, html_path = (Path(f"{prefix}.{end}") for end in ("json", "png", "html"))
    json_path.write_text(json.dumps(_figures(report), indent=1))
    try:
        from rollyard_loadtest.chaos_plot import timeline
    except ImportError:
        return [json_path]
    timeline(report, png_path)
    html_path.write_text(_html(report, png_path.read_bytes()))
    return [json_path, png_path, html_path]


def _figures(report: Report) -> dict[str, Any]:
    return {
        "settings": report.settings,
        "elapsed_s": round(report.elapsed_s, 2),
        "counts": report.counts(),
        "problems": report.problems(),
        "outcomes": Counter(entry.outcome for entry in report.answered),
        "kinds": Counter(entry.kind for entry in report.ledger.entries),
        "refusals": report.ledger.refusals,
        "events": report.events,
        "faults": [asdict(fault) for fault in report.faults],
        "infra_errors": [{**asdict(e), "hits": report.hits(e)} for e in report.infra()],
        "runs": [
            [e.run_id, e.kind, e.way, e.outcome, e.attempt, round(e.asked_s, 3),
             None if e.answered_s is None else round(e.answered_s, 3)]
            for e in report.ledger.entries
        ],
    }  # fmt: skip


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
img{max-width:100%}pre{white-space:pre-wrap;background:#f4f4f4;padding:1rem}
td,th{padding:.15rem .7rem;text-align:left;border-bottom:1px solid #ddd}.bad{color:#b00}"""


def _html(report: Report, picture: bytes) -> str:
    bad = report.problems()
    verdict = "nothing lost, nothing wrong" if not bad else f"{len(bad)} problems"
    rows = "".join(
        f"<tr><td>{f.from_s:.1f}</td><td>{f.until_s - f.from_s:.1f}</td>"
        f"<td>{html.escape(f.kind)}</td><td>{html.escape(f.part)}</td></tr>"
        for f in sorted(report.faults, key=lambda fault: fault.from_s)
    )
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    data = base64.b64encode(picture).decode()
    return (
        f"<!doctype html><meta charset=utf-8><title>Chaos: {verdict}</title>"
        f"<style>{_STYLE}</style><h1 class={'bad' if bad else 'good'}>Chaos: {verdict}</h1>"
        f"<p>{html.escape(settings)}</p><pre>{html.escape(text(report))}</pre>"
        f'<img alt="timeline" src="data:image/png;base64,{data}">'
        "<h2>Faults</h2><table><tr><th>at s<th>for s<th>what<th>part</tr>"
        f"{rows}</table>"
    )
