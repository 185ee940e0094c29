"""The ``rollyard`` command.

Service and sandbox are other processes, reached by ``python -m``; what one command alone needs is
imported in it, so that a missing extra is a line to read, not a traceback, and the rest is quick.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn, get_args

from rollyard._cli_output import end_with
from rollyard._cli_serve import exec_module, missing_extra, run_up
from rollyard._up import Plan
from rollyard._version import __version__

try:
    from cyclopts import App, CycloptsError, Parameter
    from cyclopts.validators import Number
except ImportError:
    sys.stderr.write(missing_extra("cli") + "\n")
    raise SystemExit(3) from None

USAGE, OURS, INTERRUPTED = 2, 3, 130

_HELP = """Run the Python that RL rollouts write: jailed, batched, truthful about what happened.

Start here:

    # Can this machine give the sandbox?
    rollyard doctor
    # One program, and nothing is left running.
    echo 'print(6 * 7)' | rollyard run - --local
    # A service at http://127.0.0.1:8000.
    rollyard up

Exit codes of every command: 0 done; 2 wrong usage, or a port that is taken; 3 a fault on our side
(no service, a missing part, a machine that cannot give a sandbox layer); 130 interrupted.
`rollyard run` adds 1: the program itself failed; `rollyard doctor` 1: something is missing or was
not held; `rollyard bench` and `rollyard plan --validate` 1: an answer was wrong or lost, figures
disagree.
"""

app = App(
    name="rollyard",
    help=_HELP,
    help_format="markdown",
    version=__version__,
    version_flags=["--version", "-V"],
)

_Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65535))]
_Count = Annotated[int, Parameter(validator=Number(gte=1))]
_Seconds = Annotated[float, Parameter(validator=Number(gt=0))]
TemplateName = Literal["auto", "bare", "science", "plot"]


def _are_templates(_: object, names: str | None) -> None:
    """Refuse here what would otherwise end the worker after all else has started."""
    known = [name for name in get_args(TemplateName) if name != "auto"]
    wanted = [name.strip() for name in (names or "").split(",")]
    if names is not None and (wrong := [name for name in wanted if name not in known]):
        raise ValueError(f"{', '.join(map(repr, wrong))}: known are {', '.join(known)}")


_Templates = Annotated[str | None, Parameter(validator=_are_templates)]

# Named, not imported: other packages have dependencies of their own. The first screen lists all
# commands in the order in which one meets them.
app.command(
    "rollyard_loadtest.command:app",
    name="bench",
    help="Put a load on a service and report what came of it: rates, latencies, verdicts.",
    sort_key=7,
)
app.command(
    "rollyard_loadtest.plan_command:app",
    name="plan",
    help="Say how many gateways, shards, worker cores and how much memory a load takes.",
    sort_key=8,
)
app.command(
    "rollyard._cli_images:app",
    name="images",
    help="List the guest images of this machine, or remove old ones.",
    sort_key=6,
)


@app.command(sort_key=1)
def up(
    *,
    host: Annotated[str, Parameter(env_var="ROLLYARD_HOST")] = "127.0.0.1",
    port: Annotated[_Port, Parameter(env_var="ROLLYARD_PORT")] = 8000,
    redis_url: Annotated[str | None, Parameter(env_var="ROLLYARD_REDIS_URL")] = None,
    gateways: _Count = 1,
    slots: _Count | None = None,
    templates: _Templates = None,
    allow_degraded: Annotated[bool, Parameter(negative="")] = False,
    start_timeout_s: _Seconds = 60.0,
    stop_timeout_s: _Seconds = 30.0,
    null_for_benchmarks: Annotated[bool, Parameter(negative="", show=False)] = False,
    null_service_ms: Annotated[float, Parameter(show=False)] = 0.0,
) -> int:
    """Start a whole service on this machine and keep it running until Ctrl-C or SIGTERM.

    Starts Valkey (embedded, on a private socket), the gateway and one worker; starts again what
    crashes; at the end lets running programs finish. A second Ctrl-C does not wait for them.

    Examples:

        rollyard up

        rollyard up --port 9000 --slots 16 --templates bare

        rollyard up --redis-url redis://queue.example:6379/0

    Parameters
    ----------
    host
        Address that the gateway listens at. Beyond loopback it demands ROLLYARD_API_KEYS.
    port
        TCP port of the gateway; 0 picks a free one. More gateways take the ports after it.
    redis_url
        Use this Redis (7.0 or newer) or Valkey instead of the embedded one: redis://, rediss://
        or unix:///path.
    gateways
        Number of gateway processes.
    slots
        Programs that run at once. Default: by the machine's cores.
    templates
        Warm interpreters to offer, comma-separated: bare, science, plot. Default: all.
    allow_degraded
        Start although this machine cannot give every sandbox layer (see `rollyard doctor`).
    start_timeout_s
        Seconds until all must be ready; building the guest image is not counted.
    stop_timeout_s
        Seconds that each part has to finish what it holds, before it is killed.
    null_for_benchmarks
        A worker that runs nothing and answers ok, to measure gateway and queue alone.
    null_service_ms
        Milliseconds after which that worker answers a run.
    """
    plan = Plan(
        host=host,
        port=port,
        redis_url=redis_url,
        gateways=gateways,
        slots=slots,
        templates=None if templates is None else tuple(map(str.strip, templates.split(","))),
        allow_degraded=allow_degraded,
        start_timeout_s=start_timeout_s,
        stop_timeout_s=stop_timeout_s,
        null_for_benchmarks=null_for_benchmarks,
        null_service_ms=null_service_ms,
    )
    return run_up(plan)


@app.command(sort_key=4)
def gateway(
    *,
    host: str | None = None,
    port: _Port | None = None,
    uds: Path | None = None,
    redis_url: str | None = None,
) -> NoReturn:
    """Start one gateway process: the HTTP side of a service whose queue is elsewhere.

    Everything else is set by ROLLYARD_* variables; `rollyard config` lists them.

    Example:

        rollyard gateway --port 8000 --redis-url redis://127.0.0.1:6379/0

    Parameters
    ----------
    host
        Address to listen at; beyond loopback ROLLYARD_API_KEYS must be set.
    port
        TCP port to listen at.
    uds
        Unix socket to listen at, instead of host and port.
    redis_url
        The queue's server: redis://host:port/db, rediss://… or unix:///path.
    """
    flags = {"--host": host, "--port": port, "--uds": uds, "--redis-url": redis_url}
    exec_module("rollyard_service", "service", _given(flags))


@app.command(sort_key=5)
def worker(
    *,
    redis_url: str | None = None,
    slots: _Count | None = None,
    templates: _Templates = None,
    allow_degraded: Annotated[bool, Parameter(negative="")] = False,
) -> NoReturn:
    """Start one worker: it takes runs from the queue and runs them in jails on this machine.

    Everything else is set by ROLLYARD_* variables; `rollyard config` lists them.

    Example:

        rollyard worker --redis-url redis://127.0.0.1:6379/0 --slots 16

    Parameters
    ----------
    redis_url
        The queue's server: redis://host:port/db, rediss://… or unix:///path.
    slots
        Programs that run at once. Default: by the machine's cores.
    templates
        Warm interpreters to offer, comma-separated: bare, science, plot. Default: all.
    allow_degraded
        Start although this machine cannot give every sandbox layer (see `rollyard doctor`).
    """
    flags = _given({"--redis-url": redis_url, "--slots": slots, "--templates": templates})
    exec_module(
        "rollyard_sandbox", "sandbox", [*flags, *(["--allow-degraded"] if allow_degraded else [])]
    )


@app.command(sort_key=2)
def run(
    file: Annotated[str, Parameter(allow_leading_hyphen=True)],  # for "-" alone
    /,
    *,
    stdin: Path | None = None,
    timeout_s: float = 10.0,
    memory: str = "512M",
    template: TemplateName = "auto",
    url: str | None = None,  # the client looks at ROLLYARD_URL itself: --local overrides that
    local: Annotated[bool, Parameter(negative="")] = False,
    allow_degraded: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run one program in a jail and print what it prints.

    stdout and stderr are the program's own; one line about the run follows on stderr.
    Exit codes: 0 outcome ok; 1 the program failed (exception, exit code, signal, a limit);
    2 wrong usage or a request that the service refuses; 3 a fault on our side; 130 interrupted.

    Examples:

        rollyard run program.py --timeout-s 5 --memory 256M

        echo 'print(6 * 7)' | rollyard run - --local

        rollyard run solve.py --stdin input.txt --json | jq .outcome

    Parameters
    ----------
    file
        The program; - reads it from standard input.
    stdin
        File to give to the program as its standard input. Default: empty.
    timeout_s
        Wall-clock seconds that the program may take.
    memory
        Memory that the whole run may use, such as 256M or 2G (K, M, G are powers of 1024).
    template
        Warm interpreter to start from; auto looks at the imports.
    url
        The service, http://… or unix:///path. Default: ROLLYARD_URL, else that of `rollyard up`.
    local
        Start a service for this one run, and stop it after; not together with --url.
    allow_degraded
        With --local: start although this machine cannot give every sandbox layer.
    json
        Print the whole result as one JSON object on stdout, and nothing else.
    """
    from rollyard._cli_run import RunOptions, run_program

    options = RunOptions(
        file=file,
        stdin=stdin,
        timeout_s=timeout_s,
        memory=memory,
        template=template,
        url=url,
        local=local,
        allow_degraded=allow_degraded,
        as_json=json,
    )
    return run_program(options)


@app.command(sort_key=3)
def doctor(
    *,
    attack: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> NoReturn:
    """Say, layer by layer, what of the sandbox this machine can give.

    Exit codes: 0 all layers work (or all attempts were held); 1 not all.

    Examples:

        rollyard doctor --json

        rollyard doctor --attack

    Parameters
    ----------
    attack
        Instead, run small hostile programs in the sandbox of this machine, and say of each way
        out of it whether it is closed.
    json
        Print one JSON object instead of a table.
    """
    flags = [*(["--attack"] if attack else []), *(["--json"] if json else [])]
    exec_module("rollyard_sandbox.doctor", "sandbox", flags)


@app.command(sort_key=9)
def config(*, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Print the settings of client, gateway and worker that hold here, and where each comes from.

    Secrets are not shown. Settings are ROLLYARD_* environment variables.

    Parameters
    ----------
    json
        Print one JSON object instead of a table.
    """
    from rollyard._cli_config import print_config

    return print_config(as_json=json)


@app.command(sort_key=10)
def mcp(
    *,
    url: Annotated[str | None, Parameter(env_var="ROLLYARD_URL")] = None,
    timeout_s: _Seconds = 10.0,
    max_chars: _Count = 10_000,
) -> int:
    """Serve a Python tool over MCP, on standard input and output, for agents and editors.

    Example:

        rollyard mcp --url http://gateway:8000

    Parameters
    ----------
    url
        The gateway; its key is taken from ROLLYARD_API_KEY.
    timeout_s
        Seconds that a program may take.
    max_chars
        Longest answer in characters; longer ones lose their middle.
    """
    try:
        from rollyard.integrations.mcp import make_server
    except ImportError:
        sys.stderr.write(missing_extra("mcp") + "\n")
        return OURS
    from rollyard.integrations.python_tool import AsyncPythonTool
    from rollyard.types import Limits

    try:
        tool = AsyncPythonTool(url, limits=Limits(timeout_s=timeout_s), max_chars=max_chars)
    except ValueError as error:
        sys.stderr.write(f"rollyard: {error}\n")
        return USAGE
    make_server(tool).run("stdio")
    return 0


def _given(flags: dict[str, str | int | Path | None]) -> list[str]:
    return [
        word for flag, value in flags.items() if value is not None for word in (flag, str(value))
    ]


def _exit_code() -> int:
    try:
        code = app(exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return USAGE  # cyclopts has printed what is wrong
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Entry point of the ``rollyard`` command."""
    end_with(_exit_code)


if __name__ == "__main__":
    main()
