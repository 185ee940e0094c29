"""The machine under a load test: what it is, and how fast it was meanwhile."""

import contextlib
import os
import platform
import subprocess
import threading
import time
from pathlib import Path

from rollyard_loadtest.figures import Machine

PROBE_EVERY_S = 0.25
_PROBE_TURNS = 7000


def describe() -> Machine:
    """This machine, as far as /proc tells."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        memory_bytes=int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) * 1024,
        kernel=platform.release(),
        python=platform.python_version(),
        load_average=os.getloadavg()[0],
    )


def commit() -> str:
    """Commit of the source tree this runs from, with + when changed; empty outside of one."""
    here = Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    return ""


def _git(here: Path, *arguments: str) -> str:
    done = subprocess.run(  # noqa: S603 - fixed arguments
        ["git", "-C", str(here), *arguments],  # noqa: S607
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def _field(path: str, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


class SpeedProbe:
    """Times a small loop four times a second, in CPU time, for as long as a block lasts.

    Shared and virtual machines slow down without showing it as steal; a figure from a slow minute
    must be known as such. 0.4% of a core.
    """

    best_s = float("inf")
    """Fastest loop seen in this process: full speed."""

    def __init__(self) -> None:
        self._took: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "SpeedProbe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(PROBE_EVERY_S):
            before = time.thread_time()
            total = 0
            for i in range(_PROBE_TURNS):
                total += i * i
            took = time.thread_time() - before
            self._took.append(took)
            SpeedProbe.best_s = min(SpeedProbe.best_s, took)

    @property
    def slow(self) -> float | None:
        """Median of the loops' times as a multiple of the best; None before the first."""
        if not self._took:
            return None
        return sorted(self._took)[len(self._took) // 2] / SpeedProbe.best_s
