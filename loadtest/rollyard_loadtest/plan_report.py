"""A plan for people: a table, and a picture of the percentile against the cores."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from rollyard_loadtest.costs import Costs
from rollyard_loadtest.plan import Plan

_GIB = 1 << 30


def table(plan: Plan, costs: Costs) -> str:
    """Markdown: what it takes, what it was made of, what to know."""
    wish, memory = plan.wish, plan.memory_bytes
    how = "all at once" if wish.think_s is None else f"each again {wish.think_s:g} s after"
    lines = [
        f"{wish.in_flight:,} calls of {plan.scenario}, {how}, p99 within {wish.p99_s:g} s:",
        "",
        "| part | processes | cores | memory |",
        "|---|---|---|---|",
        _row("gateways", plan.gateways, plan.gateways, memory["gateways"]),
        _row("Valkey shards", plan.shards, plan.shards, memory["shards"]),
        _row(f"workers of {plan.cores_per_worker} cores and {plan.slots_per_worker} slots",
             plan.workers, plan.worker_cores, memory["workers"]),
        "",
        f"Simulated: p50 {plan.p50_s:.3g} s, p99 {plan.p99_s:.3g} s, worker cores"
        f" {plan.utilisation:.0%} busy until the last run ended. By formula: p99"
        f" {plan.formula_p99_s:.3g} s. Without any waiting: {plan.floor_s:.3g} s.",
        "",
        "| what a run costs on this machine | ms |",
        "|---|---|",
        *(
            f"| {kind.share:.0%} {kind.name}: CPU of slot and program |"
            f" {sum(kind.cpu_ms) / len(kind.cpu_ms):.2f} |"
            for kind in costs.kinds
        ),
        f"| worker's process | {costs.mixed.worker_ms:.2f} |",
        f"| gateway, alone … in a request of 64 |"
        f" {costs.single.gateway_ms:.3f} … {costs.batched.gateway_ms:.3f} |",
        f"| Valkey, alone … in a request of 64 |"
        f" {costs.single.valkey_ms:.3f} … {costs.batched.valkey_ms:.3f} |",
        "",
        "| memory | MiB |",
        "|---|---|",
        *(
            f"| one more slot of template {name} | {size / 2**20:.2f} |"
            for name, size in costs.memory.slot_bytes.items()
        ),
        f"| a worker with its templates |"
        f" {(costs.memory.worker_bytes + costs.memory.templates_bytes) / 2**20:.0f} |",
        f"| a gateway | {costs.memory.gateway_bytes / 2**20:.0f} |",
        "",
        f"Measured on {costs.machine.cores} cores ({costs.machine.cpu}). The model is described in"
        " docs/capacity.md.",
        *(f"Note: {note}" for note in plan.notes),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(name: str, processes: int, cores: int, memory_bytes: float) -> str:
    return f"| {name} | {processes} | {cores} | {memory_bytes / _GIB:.1f} GiB |"


def picture(plan: Plan, path: Path) -> None:
    """The simulated percentile for fewer and more worker cores."""
    figure, axes = pyplot.subplots(figsize=(8, 5))
    chart: Any = axes  # matplotlib's annotations are partial
    chart.plot([cores for cores, _ in plan.curve], [p99 for _, p99 in plan.curve], "o-")
    chart.axhline(plan.wish.p99_s, color="C3", linestyle="--", label="wished for")
    chart.axhline(plan.floor_s, color="0.6", linestyle=":", label="without any waiting")
    chart.axvline(plan.worker_cores, color="C2", alpha=0.6, label="the plan")
    chart.set_yscale("log")
    chart.set_xlabel("worker cores")
    chart.set_ylabel("p99 of the latency, s")
    how = "at once" if plan.wish.think_s is None else f"every {plan.wish.think_s:g} s"
    chart.set_title(f"{plan.wish.in_flight:,} calls of {plan.scenario}, {how}")
    chart.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)  # pyright: ignore[reportUnknownMemberType]
    pyplot.close(figure)
