"""The command ``rollyard bench``: what can be said to it; what it then does is imported then."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from rollyard_loadtest.command_guard import check_folder, guarded

if TYPE_CHECKING:
    from rollyard_loadtest.figures import BenchFigures

FAILED = 1

_SHORT = "Put a load on a service and report what came of it: rates, latencies, verdicts."
_HELP = """Latency is counted from the moment at which a run was due, not from when it could be
sent, so a service that stalls is charged for it. Every answer is held against the program's known
result.
Refused runs, retries and lost runs are counted apart.

Without `--url` a whole service is started on this machine for the test, and stopped after.

Exit codes: 0 every answer was right; 1 a verdict was wrong or a run got no answer (or, with
`--strict`, a goal of the scenario was missed); 2 wrong usage, a malformed scenario; 3 no service,
a missing part.

Examples:

    rollyard bench list

    rollyard bench math-rollout

    rollyard bench burst-45k --null

    rollyard bench overload --url http://gateway:8000 --output overload

    rollyard bench my-programs.jsonl --in-flight 256 --duration-s 60

    rollyard bench compare --sandboxfusion http://127.0.0.1:8080

    rollyard bench show math-rollout > mine.toml && rollyard bench ./mine.toml
"""

app = App(name="bench", help=_SHORT, help_epilogue=_HELP, help_format="markdown")

_Count = Annotated[int, Parameter(validator=Number(gte=1))]
_Seconds = Annotated[float, Parameter(validator=Number(gt=0))]
_Flag = Annotated[bool, Parameter(negative="")]


@app.default
def bench(
    scenario: str,
    /,
    *,
    url: Annotated[list[str] | None, Parameter(negative="")] = None,
    via: Literal["sdk", "http"] | None = None,
    null: _Flag = False,
    null_service_ms: float = 0.0,
    gateways: _Count = 1,
    slots: _Count | None = None,
    cores: _Count | None = None,
    allow_degraded: _Flag = False,
    duration_s: _Seconds | None = None,
    warmup_s: Annotated[float | None, Parameter(validator=Number(gte=0))] = None,
    in_flight: _Count | None = None,
    rate_per_s: _Seconds | None = None,
    rollouts: _Count | None = None,
    turns: _Count | None = None,
    batch: _Count | None = None,
    clients: _Count | None = None,
    retries: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
    deadline_s: _Seconds | None = None,
    seed: str = "1",
    output: Path | None = None,
    strict: _Flag = False,
) -> int:
    """Run one scenario.

    Parameters
    ----------
    scenario
        A name of `rollyard bench list`, a TOML file, or a .jsonl file of programs.
    url
        Gateway to load, http://… or unix:///path; its key is taken from ROLLYARD_API_KEY. Given
        more than once, clients are shared out over them. Default: start a service here.
    via
        sdk: as users call it. http: /v1/batches with as little of a client as possible, for rates
        that the SDK's process could not make. Default: what the scenario says.
    null
        Start a service whose worker runs nothing, to measure gateway and queue alone.
    null_service_ms
        With --null: milliseconds that a run takes.
    gateways
        Gateways of the service that is started.
    slots
        Its slots. Default: by the scenario, or the machine's cores.
    cores
        Confine service and load generator to so many cores.
    allow_degraded
        Start although this machine cannot give every sandbox layer.
    duration_s
        Measured seconds of each stage.
    warmup_s
        Seconds of load before, not measured.
    in_flight
        Closed loop: runs in flight.
    rate_per_s
        Open loop: runs a second.
    rollouts
        Burst: calls at once.
    turns
        Burst: calls of each rollout, one after the other.
    batch
        Runs that travel in one request.
    clients
        Processes that make the load.
    retries
        How often a refused request is sent again.
    deadline_s
        Seconds within which a run must have started, else it is dropped as expired.
    seed
        Same seed, same programs and arrival times.
    output
        Prefix of the files written, PREFIX.json and PREFIX.html. Default: bench-SCENARIO.
    strict
        Fail when a goal of the scenario is missed.
    """
    given = {
        "duration_s": duration_s, "warmup_s": warmup_s, "in_flight": in_flight,
        "rate_per_s": rate_per_s, "rollouts": rollouts, "turns": turns, "batch": batch,
        "clients": clients, "retries": retries, "deadline_s": deadline_s,
    }  # fmt: skip

    def work() -> int:
        from rollyard_loadtest.session import Session
        from rollyard_loadtest.stack import StackOptions

        if output is not None:
            check_folder(output)
        options = StackOptions(
            slots=slots, gateways=gateways, null=null, null_service_ms=null_service_ms,
            cores=cores, allow_degraded=allow_degraded,
        )  # fmt: skip
        session = Session(
            scenario, urls=url or [], via=via, options=options, seed=seed,
            overrides={name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
        figures = session.run()
        return _written(figures, output or Path(f"bench-{session.scenario.name}"), strict)

    return guarded("bench", work)


@app.command(help_epilogue="")
def compare(
    *,
    scenario: str = "math-rollout",
    native: str | None = None,
    sandboxfusion: str | None = None,
    codejudge: str | None = None,
    rounds: _Count = 3,
    block_s: _Seconds = 10.0,
    warmup_s: Annotated[float, Parameter(validator=Number(gte=0))] = 2.0,
    in_flight: _Count = 4,
    codejudge_batch: _Count = 1,
    half_load: _Flag = False,
    slots: _Count | None = None,
    seed: str = "1",
    output: Path = Path("bench-compare"),
) -> int:
    """Measure Rollyard beside other servers: the same programs, in turns, in one run.

    Blocks of load alternate between the servers (A, B, A, B …), so that a slow minute of the
    machine falls on all of them; ratios are of one round, and their median is what counts.

    Examples:

        rollyard bench compare --sandboxfusion http://127.0.0.1:8080

        rollyard bench compare --codejudge http://127.0.0.1:8088 --half-load

    Parameters
    ----------
    scenario
        Whose programs to send.
    native
        Rollyard's gateway. Default: start a service here.
    sandboxfusion
        A server that answers POST /run_code as SandboxFusion does.
    codejudge
        A server that answers POST /run and /run/long-batch as code-judge does.
    rounds
        How often the servers take turns.
    block_s
        Seconds of each turn.
    warmup_s
        Seconds of load before each block, not measured.
    in_flight
        Runs in flight at the one whose turn it is.
    codejudge_batch
        Programs in one request to code-judge; 1 uses /run.
    half_load
        After the closed loop, offer each server half of what it did, and compare latencies.
    slots
        Slots of the service that is started.
    seed
        Same seed, same programs.
    output
        Prefix of the files written, PREFIX.json and PREFIX.html.
    """

    def work() -> int:
        from rollyard_loadtest.compare import Comparison

        check_folder(output)
        comparison = Comparison(
            scenario_path=scenario, native=native, sandboxfusion=sandboxfusion, codejudge=codejudge,
            rounds=rounds, block_s=block_s, warmup_s=warmup_s, in_flight=in_flight,
            codejudge_batch=codejudge_batch, half_load=half_load, slots=slots, seed=seed,
        )  # fmt: skip
        return _written(comparison.run(), output, strict=False)

    return guarded("bench", work)


@app.command(name="list", help_epilogue="")
def list_() -> int:
    """Name the scenarios of the package."""

    def work() -> int:
        from rollyard_loadtest import scenario

        for name in scenario.names():
            sys.stdout.write(f"{name:16} {scenario.load(name).title}\n")
        return 0

    return guarded("bench", work)


@app.command(help_epilogue="")
def show(scenario: str, /) -> int:
    """Print a scenario's TOML, to start one of your own from.

    Parameters
    ----------
    scenario
        A name of `rollyard bench list`, or a file.
    """

    def work() -> int:
        from rollyard_loadtest.scenario import path_of

        sys.stdout.write(path_of(scenario).read_text())
        return 0

    return guarded("bench", work)


@app.command(help_epilogue="")
def report(figures: Path, /, *, output: Path | None = None) -> int:
    """Draw the HTML report of a .json file again.

    Parameters
    ----------
    figures
        What `rollyard bench` wrote.
    output
        The HTML file. Default: beside it.
    """

    def work() -> int:
        from rollyard_loadtest.figures import BenchFigures
        from rollyard_loadtest.report import write_html

        path = output or figures.with_suffix(".html")
        write_html(BenchFigures.model_validate_json(figures.read_text()), path)
        sys.stderr.write(f"wrote {path}\n")
        return 0

    return guarded("bench", work)


def _written(figures: "BenchFigures", prefix: Path, strict: bool) -> int:
    """Write the files, and say by the exit code how it went."""
    json_path = prefix.with_name(prefix.name + ".json")
    json_path.write_text(figures.model_dump_json(indent=1) + "\n")
    written = [str(json_path)]
    try:
        from rollyard_loadtest.report import write_html
    except ImportError:
        sys.stderr.write("no HTML report without matplotlib: pip install 'rollyard[bench]'\n")
    else:
        html_path = prefix.with_name(prefix.name + ".html")
        write_html(figures, html_path)
        written.append(str(html_path))
    sys.stderr.write(f"wrote {' and '.join(written)}\n")
    missed = strict and not all(goal.met for goal in figures.goals)
    return FAILED if figures.failed or missed else 0


__all__ = ["app"]
