"""A pool as somebody sees who looks in from outside: for metrics, never for decisions."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


@dataclass(frozen=True)
class PoolState:
    """Counts at one moment; those of slots may disagree by the slots that are being made."""

    busy: int
    idle: int
    """Made, and free."""
    unmade: int
    templates: dict[str, int]
    """Resident bytes of each warm interpreter; 0: it is dead."""
    programs_bytes: int
    """Memory of all slots together; 0 where the machine has no control groups."""
    slots_made: dict[str, int]
    restarts: dict[str, int]
    """Times that a dead template was started again."""


def resident_bytes(jail_pid: int) -> int:
    """Resident memory of the interpreter below an nsjail; 0 if there is none."""
    with contextlib.suppress(OSError, IndexError):
        children = (_PROC / f"{jail_pid}/task/{jail_pid}/children").read_text().split()
        return int((_PROC / children[0] / "statm").read_text().split()[1]) * _PAGE_BYTES
    return 0
