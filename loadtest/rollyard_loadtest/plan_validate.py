"""Does the simulation tell the truth? The same loads on this machine and simulated, side by side.

The simulation is given which programs were asked for, and in an open loop when; what they then
took is its own.
What else computes on the machine meanwhile is measured, and given to the simulation as so many
groups of processes that always compute: a plan is for machines of its own, but a check must not
depend on finding one.
"""

import asyncio
import os
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rollyard
from rollyard_loadtest.costs import Costs, Progress, mixed_in_flight
from rollyard_loadtest.costs_calls import Called, Calls
from rollyard_loadtest.plan_model import classes_of, this_machine, trace_of
from rollyard_loadtest.scenario import Scenario
from rollyard_loadtest.simulation import Simulation
from rollyard_loadtest.simulation_model import Arrivals, Simulated, quantile
from rollyard_loadtest.stack import Stack, StackOptions

WITHIN = 0.20
"""What the simulation may be off, of the measured value."""
WARM_S, RUN_S, QUICK_S = 3.0, 20.0, 2.0
LOAD_SHARES = (0.4, 0.7)
"""Of what the closed loop did: the open loops' rates."""
BURST_S = 5.0
_SIMULATIONS = 5


@dataclass(frozen=True)
class Figure:
    """One quantity, measured and simulated; seconds, or runs a second."""

    load: str
    name: str
    measured: float
    simulated: float
    foreign_cores: float
    """Cores that other processes of this machine used meanwhile, on average."""

    @property
    def off(self) -> float:
        """How far the simulation is off, as a share of the measured value."""
        return (self.simulated - self.measured) / self.measured if self.measured else 0.0

    @property
    def agrees(self) -> bool:
        return abs(self.off) <= WITHIN


def validate(
    costs: Costs,
    scenario: Scenario,
    *,
    slots: int | None,
    seed: str,
    say: Progress,
    run_s: float = RUN_S,
) -> list[Figure]:
    """Measure and simulate a closed loop, two open loops and a burst; about a minute and a half.

    ``run_s``: seconds of each loop; the shorter, the more the percentiles are chance.

    Raises:
        NotReady, WrongAnswer: as ``costs.measure``.
    """
    say("starting a service")
    with Stack(StackOptions(slots=slots)) as stack:
        return asyncio.run(_compare(stack, costs, scenario, slots, seed, run_s, say))


async def _compare(
    stack: Stack,
    costs: Costs,
    scenario: Scenario,
    slots: int | None,
    seed: str,
    run_s: float,
    say: Progress,
) -> list[Figure]:
    figures: list[Figure] = []
    in_flight = mixed_in_flight(scenario, costs.machine.cores)
    async with rollyard.AsyncClient(stack.addresses[0]) as client:
        warm_s = min(WARM_S, run_s / 2)
        calls = Calls(client, scenario.works(f"validate-{seed}"))
        await calls.closed(in_flight, for_s=warm_s)

        groups = 1.0  # that always compute, for each core that others use

        async def compare(load: str, asking: Awaitable[list[Called]], arrivals: Arrivals) -> float:
            say(load)
            others = _Others(stack)
            called = await asking
            foreign, ours = others.so_far()
            if arrivals.kind == "closed":
                nonlocal groups
                groups = groups_for_each_core(costs.machine.cores, ours)
            # The same runs at the same times: which they are is chance, and no fault of the model.
            arrivals = replace(arrivals, trace=trace_of(costs, called))
            cluster = this_machine(costs, slots=slots, background=groups * foreign)
            simulated = [
                Simulation(cluster, classes_of(costs), arrivals, seed=f"{seed}-{number}").run()
                for number in range(_SIMULATIONS)
            ]
            figures.extend(_figures(load, called, arrivals, simulated, foreign))
            return _rate(called, arrivals)

        until_s = warm_s + run_s
        arrivals = Arrivals(kind="closed", runs=in_flight, until_s=until_s, warmup_s=warm_s)
        asking = calls.closed(in_flight, for_s=until_s)
        capacity = await compare(f"{in_flight} in flight", asking, arrivals)
        for share in LOAD_SHARES:
            rate = share * capacity
            arrivals = Arrivals(kind="poisson", rate_per_s=rate, until_s=until_s, warmup_s=warm_s)
            asking = calls.poisson(rate, for_s=until_s, seed=seed)
            await compare(f"{rate:.0f} runs/s ({share:.0%} of that)", asking, arrivals)
        runs = round(capacity * min(BURST_S, run_s))
        await compare(f"{runs} at once", calls.burst(runs), Arrivals(kind="burst", runs=runs))
    return figures


def groups_for_each_core(cores: int, ours: float) -> float:
    """Groups that always compute, for each core that others used while all were taken.

    B of them get B times what one weight gets, and our programs weigh as much as ``cores``: others
    use B / cores of what we use.
    """
    return cores / max(ours, 0.05)


class _Others:
    """What other processes use of this machine."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._before = self._now()

    def _now(self) -> tuple[float, float, float]:
        ours_s = sum(self._stack.parts().cpu_s.values()) + time.process_time()
        return time.monotonic(), _busy_s(), ours_s

    def so_far(self) -> tuple[float, float]:
        """Cores used by others, and by us."""
        passed_s, busy_s, ours_s = (
            after - before for before, after in zip(self._before, self._now(), strict=True)
        )
        return max(0.0, busy_s - ours_s) / passed_s, ours_s / passed_s


def _busy_s() -> float:
    """Core seconds that this machine has computed (proc_stat(5): all but idle and iowait)."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _figures(
    load: str, called: list[Called], arrivals: Arrivals, simulated: list[Simulated], foreign: float
) -> list[Figure]:
    burst = arrivals.kind == "burst"
    counted = [
        one.latency_s
        for one in called
        if burst or arrivals.warmup_s <= one.asked_s < arrivals.until_s
    ]
    all_latencies = [value for one in simulated for value in one.latencies_s]
    rate = sum(one.runs_per_s for one in simulated) / len(simulated)
    p50, p99 = (quantile(counted, q) for q in (0.5, 0.99))
    return [
        Figure(load, "p50", p50, quantile(all_latencies, 0.5), foreign),
        Figure(load, "p99", p99, quantile(all_latencies, 0.99), foreign),
        Figure(load, "runs/s", _rate(called, arrivals), rate, foreign),
    ]


def _rate(called: list[Called], arrivals: Arrivals) -> float:
    if arrivals.kind == "burst":
        return len(called) / max(one.answered_s for one in called)
    inside = sum(arrivals.warmup_s <= one.answered_s < arrivals.until_s for one in called)
    return inside / (arrivals.until_s - arrivals.warmup_s)


def table(figures: list[Figure]) -> str:
    """Side by side, in Markdown."""
    lines = [
        "| load | | measured | simulated | off | | other processes used |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in figures:
        unit = "" if one.name == "runs/s" else " s"
        verdict = "" if one.agrees else f"beyond {WITHIN:.0%}"
        lines.append(
            f"| {one.load} | {one.name} | {one.measured:.3g}{unit} | {one.simulated:.3g}{unit} |"
            f" {one.off:+.0%} | {verdict} | {one.foreign_cores:.1f} cores |"
        )
    agreed = sum(one.agrees for one in figures)
    lines += ["", f"{agreed} of {len(figures)} figures agree within {WITHIN:.0%}."]
    return "\n".join(lines) + "\n"


def as_json(figures: list[Figure]) -> list[dict[str, Any]]:
    """Each figure with its deviation."""
    return [{**asdict(one), "off": round(one.off, 4), "agrees": one.agrees} for one in figures]
