"""Is anything left? Keys in the server, processes, control groups, mounts and files."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from rollyard_loadtest.processes import descendants

_WITHIN_S = 25.0  # a killed worker's announcement, and a lease, end by themselves
_LOOK_S = 0.1
# Keys that exist only while something is queued or runs.
_LIVE = frozenset({"load", "ring", "leases", "deadlines", "job", "wake"})


def key_faults(socket: Path) -> list[str]:
    """What the queue's server holds although all is answered; waits for what goes by itself."""
    import redis  # the service's own; whoever starts one has it

    with redis.Redis(unix_socket_path=str(socket)) as server:
        return _settled(lambda: _key_faults(server))


def _key_faults(server: Any) -> list[str]:
    left: list[str] = []
    keys = cast("list[bytes]", server.keys("{rollyard*}:*"))
    if not keys:
        return ["no key at all: a queue with workers has some, so this looks in the wrong place"]
    for key in keys:
        name = key.decode().partition("}:")[2]
        kind = name.partition(":")[0]
        state = server.hget(key, "state") if kind == "run" else b""
        if kind in _LIVE:
            left.append(f"key {name}")
        elif kind == "run" and state in (b"queued", b"running"):
            left.append(f"key {name}: still {state.decode()}")
        elif server.pttl(key) == -1:
            left.append(f"key {name} would stay for ever")
    return left


def machine_state() -> tuple[set[str], set[str]]:
    """Mount points of this process's view, and control groups that workers made."""
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    groups = {
        place
        for place, _, _ in os.walk("/sys/fs/cgroup")
        if Path(place).name.startswith("rollyard-")
    }
    return mounts, groups


def machine_faults(before: tuple[set[str], set[str]], pids: set[int], directory: Path) -> list[str]:
    """What remains once all parts have stopped.

    Args:
        before: what :func:`machine_state` said before the start.
        pids: the numbers of all workers that ever ran; other services may be on this machine.
        directory: the parts' own directory, where TMPDIR points.
    """
    names = {f"rollyard-{pid}" for pid in pids}

    def look() -> list[str]:
        _reap()
        mounts, groups = machine_state()
        left = [f"process {pid}: {_command(pid)}" for pid in descendants(os.getpid())[1:]]
        left += [f"mount {place}" for place in mounts - before[0] if str(directory) in place]
        left += [f"group {place}" for place in groups - before[1] if Path(place).name in names]
        left += [
            f"file {path.relative_to(directory)}"
            for path in directory.iterdir()
            # A gateway leaves its socket for a successor, which may listen there already.
            if path.suffix not in (".log", ".sock")
        ]
        return left

    return _settled(look)


def _settled(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + _WITHIN_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return left


def _reap() -> None:
    """Collect orphans that came to us and have ended; our parts were waited for before."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return text[:120] or Path(f"/proc/{pid}/comm").read_text().strip()
    return "gone"
