"""Run a module with clocks that are off: ``python skewed.py SECONDS MODULE ARGUMENTS…``.

Monotonic and boot-time clocks are shifted by the kernel, in a time namespace. It has none for the
wall clock, so that one is shifted where Python code reads it: ``time.time``, ``time.time_ns`` and
``datetime``. What C code of a library reads for itself is not shifted.
"""

import datetime
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Self, override


def shift_kernel_clocks(seconds: int) -> None:
    """Enter a time namespace; this process must have one thread only."""
    os.unshare(os.CLONE_NEWTIME)
    offsets = f"monotonic {seconds} 0\nboottime {seconds} 0\n"
    Path("/proc/self/timens_offsets").write_text(offsets)
    inside = os.open("/proc/self/ns/time_for_children", os.O_RDONLY)
    os.setns(inside, os.CLONE_NEWTIME)
    os.close(inside)


def shift_wall_clock(seconds: int) -> None:
    """Before anything else is imported, or it would keep the right clock."""
    now, now_ns = time.time, time.time_ns  # noqa: TID251 - it is what this is about
    step = datetime.timedelta(seconds=seconds)

    class Shifted(datetime.datetime):
        @classmethod
        @override
        def now(cls, tz: datetime.tzinfo | None = None) -> Self:
            return super().now(tz) + step

    time.time = lambda: now() + seconds  # noqa: TID251
    time.time_ns = lambda: now_ns() + seconds * 1_000_000_000
    datetime.datetime = Shifted


if __name__ == "__main__":
    off_s = int(sys.argv[1])
    shift_kernel_clocks(off_s)
    shift_wall_clock(off_s)
    del sys.argv[:2]
    sys.path.pop(0)  # this folder, as -P does it
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
