"""CPU and memory of a service's processes, from /proc."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """CPU seconds, with those of children already waited for; PSS in bytes."""

    cpu_s: float
    pss_bytes: int
    processes: int


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def descendants(pid: int) -> list[int]:
    """``pid`` and everything below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:  # grows while it is walked
        found += parents.get(one, [])
    return found


def usage(pids: list[int], *, memory: bool = False) -> Usage:
    """Sum over processes; those that have ended meanwhile count nothing."""
    cpu_s, pss_bytes, processes = 0.0, 0, 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            fields = _stat(pid)
            cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
            processes += 1
            if memory:
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        pss_bytes += int(line.split()[1]) * 1024
    return Usage(cpu_s, pss_bytes, processes)
