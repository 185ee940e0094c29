"""An outer bound around a service under test, so that a wall that fails cannot take the machine.

Control groups of version 1 only: where the machine has version 2, these tests rely on the bounds
that the worker sets itself.
"""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from process_tree import until

_CONTROLLERS = {"memory": "memory.limit_in_bytes", "pids": "pids.max"}


def _own_group(controller: str) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        group = Path("/sys/fs/cgroup", controller, path.lstrip("/"))
        if controller in names.split(",") and group.is_dir():
            return group
    return None


def _move(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


class Guard:
    """A group per controller; what is started within :meth:`inside` lives in them for good."""

    def __init__(self, name: str, *, memory_bytes: int, pids: int) -> None:
        self._homes = {one: home for one in _CONTROLLERS if (home := _own_group(one))}
        # Not "rollyard-<pid>": a worker sweeps those.
        self.groups = {
            one: home / f"guard-{name}-{os.getpid()}" for one, home in self._homes.items()
        }
        bounds = {"memory": memory_bytes, "pids": pids}
        for controller, group in self.groups.items():
            group.mkdir()
            (group / _CONTROLLERS[controller]).write_text(str(bounds[controller]))

    @contextlib.contextmanager
    def inside(self) -> Generator[None]:
        """Move this process in, for as long as it starts something."""
        try:
            for group in self.groups.values():
                _move(group)
            yield
        finally:
            for home in self._homes.values():
                _move(home)

    def close(self) -> None:
        """Remove the groups; fails if a process or a group of the service is left."""
        for group in self.groups.values():
            below = [path.name for path in group.iterdir() if path.is_dir()]
            assert until(lambda group=group: _removed(group)), f"left in {group}: {below}"


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
