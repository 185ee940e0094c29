"""How a request's code becomes processes: in this interpreter, or by executing a command.

python, warm    the forked interpreter itself
python, fresh   a new interpreter, in a jail that was made for this run alone
bash            bash main.sh
cpp             g++ main.cpp, then its product; the compiler has a time limit of its own
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from . import box, child

_PYTHON = "/opt/python/bin/python3"
_COMMANDS: dict[str, tuple[str, ...]] = {
    "python": (_PYTHON, "-s", "main.py"),
    "bash": ("/usr/bin/bash", "main.sh"),
    "cpp": ("./main",),
}
_COMPILERS: dict[str, tuple[str, ...]] = {
    "cpp": ("/usr/bin/g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"),
}
SOURCES = {"python": "main.py", "bash": "main.sh", "cpp": "main.cpp"}


@dataclass(frozen=True, slots=True)
class Step:
    """One process of a run. ``start`` runs in the child, confined, and never returns."""

    phase: str
    timeout_s: float
    start: Callable[[dict[str, Any], mmap.mmap], NoReturn]


def steps(job: dict[str, Any]) -> tuple[Step, ...]:
    """The processes of a run, in order; the last one is the program."""
    limits = job["limits"]
    language = job.get("language", "python")
    if language == "python" and job.get("isolation", "warm") == "warm":
        return (Step("run", limits["timeout_s"], child.run),)
    if compiler := _COMPILERS.get(language):
        return (
            Step("compile", limits["compile_timeout_s"], _writing(compiler)),
            Step("run", limits["timeout_s"], _executing(_COMMANDS[language])),
        )
    return (Step("run", limits["timeout_s"], _writing(_COMMANDS[language])),)


def _writing(command: tuple[str, ...]) -> Callable[[dict[str, Any], mmap.mmap], NoReturn]:
    """Write the request's files first, then execute."""

    def start(job: dict[str, Any], begun: mmap.mmap) -> NoReturn:
        box.put(job["files"])
        box.put({SOURCES[job.get("language", "python")]: job["code"]})
        _execute(command, begun)

    return start


def _executing(command: tuple[str, ...]) -> Callable[[dict[str, Any], mmap.mmap], NoReturn]:
    return lambda _, begun: _execute(command, begun)


def _execute(command: tuple[str, ...], begun: mmap.mmap) -> NoReturn:
    begun[0] = 1  # the mapping itself goes with the old image
    try:
        os.execve(command[0], command, {**child.ENVIRONMENT, "PYTHONUNBUFFERED": "1"})  # noqa: S606
    except BaseException:
        begun[0] = 0
        raise
