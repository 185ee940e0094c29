"""What processes exist below one, read from /proc: the tests' proof that nothing is left."""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """A process, told apart from a later one with the same number by its start time."""

    pid: int
    started: int
    parent: int
    state: str
    name: str


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant that loses its own.

    Nothing that was started below it can then hide from :func:`below`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes() -> dict[int, Process]:
    """All processes that this one can see, by number."""
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                words = rest.split()
                pid = int(entry.name)
                found[pid] = Process(pid, int(words[19]), int(words[1]), words[0], name)
    return found


def below(root: int) -> set[Process]:
    """The running processes below ``root``, at any depth; zombies are not running."""
    everything = processes()
    inside: set[int] = {root}
    grew = True
    while grew:
        more = {one.pid for one in everything.values() if one.parent in inside} - inside
        grew = bool(more)
        inside |= more
    return {everything[pid] for pid in inside - {root} if everything[pid].state not in "ZX"}


def alive(process: Process) -> bool:
    """True while this very process runs."""
    now = processes().get(process.pid)
    return now is not None and now.started == process.started and now.state not in "ZX"


def reap(pids: set[int]) -> None:
    """Collect adopted orphans that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> bool:
    """Look at ``condition`` until it holds; False when it did not within ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
