"""The command ``rollyard plan``: what can be said to it; what it then does is imported then."""

import json as json_
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from rollyard_loadtest.command_guard import check_folder, guarded

if TYPE_CHECKING:
    from rollyard_loadtest.costs import Costs
    from rollyard_loadtest.plan import Plan
    from rollyard_loadtest.scenario import Scenario

DIFFERS = 1

_HELP = """Measures what a run costs each part of the service on this machine (about a minute, with
a service of its own), then answers how many gateways, Valkey shards, worker cores and how much
memory it takes. Formulas give the first guess, a simulation of the whole service the answer; see
docs/capacity.md.

`--in-flight` calls come all at once, as a training step fires them; with `--think-s` each rollout
calls again so long after its answer.

Exit codes: 0 planned (with `--validate`: all figures agree); 1 `--validate`: some do not; 2 wrong
usage, or a wish that no number of cores fulfils; 3 no service, a missing part.

Examples:

    rollyard plan --in-flight 45000 --p99 1.0 --mix math-rollout

    rollyard plan --in-flight 45000 --mix math-rollout --costs costs.json

    rollyard plan --in-flight 2000 --p99 0.5 --think-s 8 --mix ./mine.toml --json

    # The simulation beside this machine.
    rollyard plan --validate --mix math-rollout
"""

app = App(
    name="plan",
    help="Say how many gateways, shards, worker cores and how much memory a load takes.",
    help_epilogue=_HELP,
    help_format="markdown",
)

_Count = Annotated[int, Parameter(validator=Number(gte=1))]
_Seconds = Annotated[float, Parameter(validator=Number(gt=0))]
_Flag = Annotated[bool, Parameter(negative="")]


@app.default
def plan(
    *,
    in_flight: _Count = 45_000,
    p99: _Seconds = 1.0,
    mix: str = "math-rollout",
    think_s: _Seconds | None = None,
    batch: Annotated[int, Parameter(validator=Number(gte=1, lte=1024))] = 64,
    cores_per_worker: _Count | None = None,
    of: Literal["finished", "all"] = "finished",
    costs: Path | None = None,
    quick: _Flag = False,
    validate: _Flag = False,
    slots: _Count | None = None,
    seed: str = "1",
    json: _Flag = False,
    output: Path | None = None,
) -> int:
    """Plan.

    Parameters
    ----------
    in_flight
        Rollouts that call.
    p99
        Seconds within which 99 of 100 calls must be answered.
    mix
        Programs: a scenario of `rollyard bench list`, a TOML file, or a .jsonl file of programs.
    think_s
        Seconds between a rollout's answer and its next call. Default: all call once, at once.
    batch
        Runs that travel in one request; the SDK gathers up to 64.
    cores_per_worker
        Cores of one worker process. Default: as many as its thread can keep busy.
    of
        What the percentile is about: runs that end by themselves, or all, those that are stopped
        at their own time limit too.
    costs
        File with measured costs: used if it exists, else written. Default: measure anew.
    quick
        Measure roughly, in a third of the time.
    validate
        Instead, put loads on a service here, simulate the same, and print both side by side.
    slots
        Slots of the service that is started for measuring.
    seed
        Same seed, same programs and simulation.
    json
        Print one JSON object instead of the tables.
    output
        Prefix of the files written, PREFIX.json and PREFIX.png. Default: none are written.
    """
    say = _Progress()

    def work() -> int:
        from rollyard_loadtest.plan import Planner, Wish
        from rollyard_loadtest.scenario import load

        if output is not None:
            check_folder(output)
        scenario = load(mix)
        known = _costs(costs, scenario, slots, quick, say)
        if validate:
            return _validated(
                known, scenario, slots=slots, seed=seed, quick=quick, as_json=json, say=say
            )
        wish = Wish(
            in_flight=in_flight, p99_s=p99, think_s=think_s, batch=batch,
            cores_per_worker=cores_per_worker, of=of,
        )  # fmt: skip
        made = Planner(known, seed=seed, say=say).plan(wish)
        say.done()
        return _written(made, known, output, as_json=json)

    try:
        return guarded("plan", work)
    finally:
        say.done()


def _written(made: "Plan", costs: "Costs", output: Path | None, *, as_json: bool) -> int:
    from rollyard_loadtest.plan_report import picture, table

    text = json_.dumps(made.figures(), indent=1) + "\n"
    if output is not None:
        output.with_name(output.name + ".json").write_text(text)
        picture(made, output.with_name(output.name + ".png"))
    sys.stdout.write(text if as_json else table(made, costs))
    return 0


def _costs(
    path: Path | None, scenario: "Scenario", slots: int | None, quick: bool, say: "_Progress"
) -> "Costs":
    from rollyard_loadtest.costs import FULL, QUICK, load_costs, measure

    if path is not None and path.exists():
        return load_costs(path, scenario)
    measured = measure(scenario, slots=slots, effort=QUICK if quick else FULL, say=say)
    if path is not None:
        path.write_text(measured.model_dump_json(indent=1) + "\n")
    return measured


def _validated(
    costs: "Costs", scenario: "Scenario", *, slots: int | None, seed: str, quick: bool,
    as_json: bool, say: "_Progress",
) -> int:  # fmt: skip
    from rollyard_loadtest.plan_validate import QUICK_S, RUN_S, table, validate
    from rollyard_loadtest.plan_validate import as_json as figures_of

    run_s = QUICK_S if quick else RUN_S
    figures = validate(costs, scenario, slots=slots, seed=seed, say=say, run_s=run_s)
    say.done()
    sys.stdout.write(
        json_.dumps(figures_of(figures), indent=1) + "\n" if as_json else table(figures)
    )
    return 0 if all(one.agrees for one in figures) else DIFFERS


class _Progress:
    """What is being done, on one line of a terminal or a line each."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()
        self._open = False

    def __call__(self, what: str) -> None:
        line = f"{time.monotonic() - self._began:4.0f} s  {what}"
        sys.stderr.write(f"\r{line:<78}" if self._live else f"{line}\n")
        sys.stderr.flush()
        self._open = self._live

    def done(self) -> None:
        """End the line."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False


__all__ = ["app"]
