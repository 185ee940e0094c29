"""The clock of one run: when to look, and whether a limit is reached then.

Wall time counts from the start of the program's process, which the kernel tells and no program
can change (starttime in /proc/<pid>/stat, Documentation/filesystems/proc.rst): that its PID 1 was
slow to wake up and fork is not the program's. What a thread of the run waited for a core because
others were busy is given back, up to a multiple of the limit: an overloaded machine is not told
as a slow program. Kernel doc: Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

_GRACE = 2.0
_LEAST_PAUSE_S = 0.005
_START_PAUSE_S = 0.02
_START_PATIENCE_S = 10.0  # PID 1 forks within a millisecond of CPU; past this it hangs
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Usage(NamedTuple):
    """What processes have had."""

    cpu_s: float
    """With that of their waited-for children."""
    waited_s: float
    """The longest time that one of their threads waited for a core."""
    first_s: float | None
    """When the oldest was forked, on CLOCK_BOOTTIME; None: there is no process."""


class Clock:
    """Limits of one run, which is ordered at creation."""

    def __init__(self, timeout_s: float, cpu_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._cpu_s = cpu_s
        self._ordered = time.monotonic()
        self._ordered_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._late_s: float | None = None
        self.waited_s = 0.0
        """Waiting for a core that a time-out did not count."""

    @property
    def saw_program(self) -> bool:
        """False as long as no look has found a process."""
        return self._late_s is not None

    def first_look_s(self) -> float:
        """Seconds from the order until a limit can be reached at the earliest."""
        return min(self._timeout_s, self._cpu_s or self._timeout_s)

    def look(self, pids: list[int], group_cpu_s: float | None) -> str | float:
        """Which limit the processes have reached, or the seconds until the next look.

        Args:
            pids: the run's processes.
            group_cpu_s: CPU of its control group; where there is none, that of the processes
                counts, which misses children that nobody waited for.
        """
        used_s, waited_s, first_s = usage(pids)
        elapsed_s = time.monotonic() - self._ordered
        if first_s is not None and self._late_s is None:
            # Ticks are rounded down: one more, and the program never loses by it.
            self._late_s = max(0.0, first_s + 1 / _TICKS_PER_S - self._ordered_boot_s)
        if self._late_s is None:
            if elapsed_s >= self._timeout_s + _START_PATIENCE_S:
                return "timeout"
            return _START_PAUSE_S
        if group_cpu_s is not None:
            used_s = group_cpu_s
        if self._cpu_s is not None and used_s >= self._cpu_s:
            return "cpu_timeout"
        wall_s = max(0.0, elapsed_s - self._late_s)
        # Threads of one run that wait for each other's core are no one else's fault: what the
        # run used as CPU is never given back.
        starved_s = max(0.0, min(waited_s, wall_s - used_s, self._timeout_s * _GRACE))
        left_s = self._timeout_s - (wall_s - starved_s)
        if left_s <= 0:
            self.waited_s = starved_s
            return "timeout"
        if self._cpu_s is not None:
            left_s = min(left_s, self._cpu_s - used_s)
        return max(left_s, _LEAST_PAUSE_S)


def usage(pids: list[int]) -> Usage:
    """What these processes have had; those that have ended meanwhile count nothing."""
    used_s, waited_s, first_s = 0.0, 0.0, None
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (_PROC / f"{pid}/stat").read_bytes().rpartition(b") ")[2].split()
            used_s += sum(map(int, fields[11:15])) / _TICKS_PER_S  # utime stime cutime cstime
            begun_s = int(fields[19]) / _TICKS_PER_S
            first_s = begun_s if first_s is None else min(first_s, begun_s)
            for task in (_PROC / f"{pid}/task").iterdir():
                waited_s = max(waited_s, int((task / "schedstat").read_text().split()[1]) / 1e9)
    return Usage(used_s, waited_s, first_s)


def any_runnable(pids: list[int]) -> bool:
    """True if a thread of these has a core or waits for one (state R), or for a disk (D)."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in (_PROC / f"{pid}/task").iterdir():
                if (task / "stat").read_bytes().rpartition(b") ")[2][:1] in (b"R", b"D"):
                    return True
    return False


def exceeds(pids: list[int], memory_bytes: int) -> bool:
    """True if processes have more memory than this for themselves, with their part of shared
    memory and of mapped files that are memory.

    Pages that they merely share with the template do not count, as in a control group. Only where
    these could make the difference is each mapping looked at, which takes milliseconds.
    """
    own, shared = map(sum, zip((0, 0), *map(_own_and_shared, pids), strict=True))
    if own + shared <= memory_bytes:
        return False
    return own + shared - sum(map(_warm_bytes, pids)) > memory_bytes


def _own_and_shared(pid: int) -> tuple[int, int]:
    """Bytes of a process's anonymous memory, and its part of what is in memory files."""
    kib: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / f"{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value, _ = line.split()
            kib[name] = int(value)
    # The first also counts pages of the template's file that no other process maps just now, the
    # second its part of memory that is shared with the template where there is no such file.
    anonymous = min(kib.get("Private_Dirty:", 0), kib.get("Pss_Anon:", 0))
    return (anonymous + kib.get("SwapPss:", 0)) * 1024, kib.get("Pss_Shmem:", 0) * 1024


def _warm_bytes(pid: int) -> int:
    """The part of _own_and_shared() that is the template's (guest/mappings.py)."""
    total, warm, part = 0, False, 0
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / f"{pid}/smaps").read_text(errors="replace").splitlines():
            name, value, *_ = line.split()
            if not name.endswith(":"):
                warm = "/memfd:rollyard-warm" in line
            elif warm and name == "Pss:":
                part = int(value)
            elif warm and name == "Anonymous:":  # what the process wrote is its own
                total += max(0, part - int(value)) * 1024
    return total


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``; for machines where no control group lists them."""
    found = [pid]
    for one in found:  # grows while it is walked
        with contextlib.suppress(OSError):
            for task in (_PROC / f"{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]
