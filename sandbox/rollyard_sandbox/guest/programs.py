"""How a request's code becomes a process: in this interpreter, or by executing a command.

python, warm    the forked interpreter itself
python, fresh   a new interpreter, in a jail that was made for this run alone
bash            bash main.sh
cpp             g++ main.cpp, and by a second order its product
"""

import json
import marshal
import mmap
import os
from typing import Any, NoReturn

from . import box, child
from .protocol import BEGUN, COMPILE, COMPILED, MAX_FETCHED_BYTES, MAX_FETCHED_FILES, REFUSED

_COMMANDS: dict[str, tuple[str, ...]] = {
    "python": ("/opt/python/bin/python3", "main.py"),
    "bash": ("/usr/bin/bash", "main.sh"),
    "cpp": ("./main",),
}
_COMPILERS: dict[str, tuple[str, ...]] = {
    "cpp": ("/usr/bin/g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"),
}
SOURCES = {"python": "main.py", "bash": "main.sh", "cpp": "main.cpp"}


def read_job(descriptor: int) -> dict[str, Any]:
    """The request, from the file that the worker made for this run.

    Marshal, because both ends are ours and of one Python version, and because it is one call: the
    modules behind JSON would cost a fork 70 more copied pages.
    """
    return marshal.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))  # noqa: S302


def start(job: dict[str, Any], flags: int, begun: mmap.mmap) -> NoReturn:
    """Become the program, by exec or by raising Become; runs in the child, confined.

    ``begun`` is shared with PID 1, and out of the program's reach before its first instruction.
    """
    language = job["language"]
    if not flags & COMPILED:
        try:
            box.put(job["files"])
            box.put({SOURCES[language]: job["code"]})
        except OSError as error:  # too large, too long a name: the request's doing
            os.write(2, f"cannot write the request's files: {error}\n".encode())
            begun[0] = REFUSED
            os._exit(1)
    if language == "python" and job["isolation"] == "warm":
        child.become(job, begun)
    _execute(_COMPILERS[language] if flags & COMPILE else _COMMANDS[language], begun)


def _execute(command: tuple[str, ...], begun: mmap.mmap) -> NoReturn:
    begun[0] = BEGUN  # the mapping itself goes with the old image
    try:
        os.execve(command[0], command, {**child.ENVIRONMENT, "PYTHONUNBUFFERED": "1"})  # noqa: S606
    except BaseException:
        begun[0] = 0
        raise


def collect(job_descriptor: int, target: int) -> None:
    """Write what ``fetch_files`` names, as JSON, to ``target``; runs in a process of its own."""
    wanted = read_job(job_descriptor)["fetch_files"]
    files, left_out = box.fetch(wanted, MAX_FETCHED_BYTES, MAX_FETCHED_FILES)
    answer = {"files": files, "left_out": left_out[:MAX_FETCHED_FILES]}
    os.set_blocking(target, False)  # a file takes all at once; whatever else it is must not hang us
    with open(target, "wb", closefd=False) as file:
        file.write(json.dumps(answer, ensure_ascii=False).encode())
