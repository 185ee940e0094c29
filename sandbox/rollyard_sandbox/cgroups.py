"""Control groups: a leaf for each slot, version 2 or version 1, below this process's own group.

Kernel docs: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
A leaf's counters are read through descriptors that stay open: one system call each.
"""

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "rollyard-"
_REMOVAL_PATIENCE_S = 5.0
_SLOT_CPU_WEIGHT = 100
_PROCESS_SHARES, _PROCESS_WEIGHT = 1024, 100  # what version 1 and 2 give to any one process
_MOST_WEIGHT = 10_000
_CHARGE_BATCH_BYTES = 64 * 4096  # the kernel charges ahead by up to this (MEMCG_CHARGE_BATCH)


@dataclass(frozen=True)
class Counts:
    """A leaf's counters, to be compared with those at the start of the run."""

    oom_kills: int = 0
    """Processes of the leaf that the kernel killed for want of memory, here or on the machine."""
    limit_hits: int = 0
    """More than before: the leaf's own limit was reached."""
    cpu_s: float = 0.0


class Leaf(ABC):
    """One slot's group. The slot's PID 1 is put in once; its forks are born there."""

    @abstractmethod
    def add(self, pid: int) -> None:
        """Move a process in; raises OSError."""

    @abstractmethod
    def limit(self, memory_bytes: int, pids: int) -> None:
        """Set the limits of the next run and start its peak anew; raises OSError."""

    @abstractmethod
    def counts(self) -> Counts:
        """The counters now."""

    @abstractmethod
    def cpu_s(self) -> float:
        """CPU seconds of all processes that ever were in it, waited for or not."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The processes in it."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Most memory in use since limit()."""

    @abstractmethod
    def remove(self) -> None:
        """Kill what is left and delete the group; waits a little for the kernel."""


class Cgroups(ABC):
    """The parent of all leaves of this worker."""

    version: int

    @abstractmethod
    def leaf(self, name: str) -> Leaf:
        """Make a leaf; raises OSError."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory in use by all leaves together; raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Delete the parent; all leaves must be gone."""


def _write(path: Path, value: str) -> None:
    # One write(2) for the whole value: the kernel parses each write by itself.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _value(descriptor: int, wanted: str) -> int:
    """A named number of a file of "name value" lines."""
    for line in os.pread(descriptor, 4096, 0).decode().splitlines():
        name, _, value = line.partition(" ")
        if name == wanted:
            return int(value)
    return 0


def _pids(directory: Path) -> list[int]:
    with contextlib.suppress(OSError), (directory / "cgroup.procs").open("rb", 0) as file:
        return [int(line) for line in file.readall().split()]
    return []


def _remove_group(directory: Path) -> None:
    """Kill all in a group and delete it, with the groups below."""
    with contextlib.suppress(OSError):
        for below in directory.iterdir():
            if below.is_dir():
                _remove_group(below)
    deadline = time.monotonic() + _REMOVAL_PATIENCE_S
    while directory.is_dir():
        for pid in _pids(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            directory.rmdir()
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.002)


def _cores() -> int:
    """Cores that the slots' common group may use, and so its weight: left at that of one process,
    all slots together would get as much as any one process beside them (sched-design-CFS.rst)."""
    return len(os.sched_getaffinity(0))


def _own_groups() -> dict[str, str]:
    """Controller name ("" for version 2) to this process's group."""
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _mounts() -> dict[str, Path]:
    """Controller name ("" for version 2) to its mount point."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("", Path(target))
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, Path(target))
    return found


def _sweep(parent: Path) -> None:
    """Delete what a killed worker left: groups named after a process that is gone."""
    for directory in parent.glob(f"{_PREFIX}*"):
        pid = directory.name.removeprefix(_PREFIX)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove_group(directory)


def open_cgroups() -> Cgroups:
    """Use version 2 where its controllers are delegated to us, else version 1.

    Raises:
        OSError: neither can be used; the message says what was tried.
    """
    mounts, own = _mounts(), _own_groups()
    reasons: list[str] = []
    for kind in (V2Cgroups, V1Cgroups):
        try:
            return kind(mounts, own)
        except (OSError, KeyError) as error:
            reasons.append(f"version {kind.version}: {error}")
    raise OSError("no usable control groups (" + "; ".join(reasons) + ")")


class V2Cgroups(Cgroups):
    version = 2

    def __init__(self, mounts: dict[str, Path], own: dict[str, str]) -> None:
        group = mounts[""] / own[""].lstrip("/")
        controllers = (group / "cgroup.controllers").read_text().split()
        missing = {"memory", "pids"} - set(controllers)
        if missing:
            raise OSError(f"{group} lacks the controllers {', '.join(sorted(missing))}")
        wanted = [name for name in ("memory", "pids", "cpu") if name in controllers]
        _sweep(group)
        # A group with processes cannot give controllers to groups below it, unless it is the
        # machine's root: this worker moves to a leaf of its own first. The root has no type file;
        # in a container with a cgroup namespace its name is "/" too, and it is not the root.
        if (group / "cgroup.type").exists():
            home = group / "worker"
            home.mkdir(exist_ok=True)
            for pid in _pids(group):
                with contextlib.suppress(ProcessLookupError):
                    _write(home / "cgroup.procs", str(pid))
        _write(group / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))
        self._parent = group / f"{_PREFIX}{os.getpid()}"
        self._parent.mkdir()
        _write(self._parent / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))
        self._cpu = "cpu" in wanted
        if self._cpu:
            weight = min(_MOST_WEIGHT, _PROCESS_WEIGHT * _cores())
            _write(self._parent / "cpu.weight", str(weight))

    def leaf(self, name: str) -> Leaf:
        return _V2Leaf(self._parent / name, cpu=self._cpu)

    def memory_bytes(self) -> int:
        return int((self._parent / "memory.current").read_text())

    def close(self) -> None:
        _remove_group(self._parent)


class _V2Leaf(Leaf):
    def __init__(self, directory: Path, *, cpu: bool) -> None:
        directory.mkdir()
        self._directory = directory
        with contextlib.suppress(OSError):  # absent where the kernel has no swap accounting
            _write(directory / "memory.swap.max", "0")
        if cpu:
            _write(directory / "cpu.weight", str(_SLOT_CPU_WEIGHT))
        # events counts kills by anyone; events.local the times that this very limit was met.
        self._events = os.open(directory / "memory.events", os.O_RDONLY | os.O_CLOEXEC)
        self._local = os.open(directory / "memory.events.local", os.O_RDONLY | os.O_CLOEXEC)
        self._cpu = os.open(directory / "cpu.stat", os.O_RDONLY | os.O_CLOEXEC)
        try:  # Linux 6.12: a write starts a new peak for this descriptor
            self._peak = os.open(directory / "memory.peak", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            self._peak = -1
        self._set = (0, 0)

    def add(self, pid: int) -> None:
        _write(self._directory / "cgroup.procs", str(pid))

    def limit(self, memory_bytes: int, pids: int) -> None:
        if self._set != (memory_bytes, pids):
            _write(self._directory / "memory.max", str(memory_bytes))
            _write(self._directory / "pids.max", str(pids))
            self._set = (memory_bytes, pids)
        if self._peak >= 0:
            os.pwrite(self._peak, b"0", 0)

    def counts(self) -> Counts:
        kills, hits = _value(self._events, "oom_kill"), _value(self._local, "oom")
        return Counts(kills, hits, self.cpu_s())

    def cpu_s(self) -> float:
        return _value(self._cpu, "usage_usec") / 1e6

    def pids(self) -> list[int]:
        return _pids(self._directory)

    def peak_bytes(self) -> int:
        return int(os.pread(self._peak, 32, 0)) if self._peak >= 0 else 0

    def remove(self) -> None:
        for descriptor in (self._events, self._local, self._cpu, self._peak):
            if descriptor >= 0:
                os.close(descriptor)
        with contextlib.suppress(OSError):
            _write(self._directory / "cgroup.kill", "1")
        _remove_group(self._directory)


class V1Cgroups(Cgroups):
    version = 1

    def __init__(self, mounts: dict[str, Path], own: dict[str, str]) -> None:
        self._parents: dict[str, Path] = {}
        # Usually one hierarchy has both, mounted as "cpu,cpuacct".
        self._shares_with_cpuacct = mounts.get("cpu") == mounts["cpuacct"]
        for controller in ("memory", "pids", "cpuacct", "cpu"):
            if controller == "cpu" and (controller not in mounts or self._shares_with_cpuacct):
                continue
            group = mounts[controller] / own[controller].lstrip("/")
            if not group.is_dir():  # a bind mount shows the group itself as the root
                group = mounts[controller]
            _sweep(group)
            parent = group / f"{_PREFIX}{os.getpid()}"
            parent.mkdir(exist_ok=True)
            self._parents[controller] = parent
        cpu = self._parents.get("cpuacct" if self._shares_with_cpuacct else "cpu")
        if cpu:
            _write(cpu / "cpu.shares", str(_PROCESS_SHARES * _cores()))

    def leaf(self, name: str) -> Leaf:
        return _V1Leaf({controller: at / name for controller, at in self._parents.items()})

    def memory_bytes(self) -> int:
        return int((self._parents["memory"] / "memory.usage_in_bytes").read_text())

    def close(self) -> None:
        for parent in self._parents.values():
            _remove_group(parent)


class _V1Leaf(Leaf):
    def __init__(self, directories: dict[str, Path]) -> None:
        for directory in directories.values():
            directory.mkdir()
        self._directories = directories
        memory = directories["memory"]
        self._has_swap = (memory / "memory.memsw.limit_in_bytes").exists()
        self._events = os.open(memory / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        self._peak = os.open(memory / "memory.max_usage_in_bytes", os.O_RDWR | os.O_CLOEXEC)
        usage = directories["cpuacct"] / "cpuacct.usage"
        self._cpu = os.open(usage, os.O_RDONLY | os.O_CLOEXEC)
        self._set = (0, 0)

    def add(self, pid: int) -> None:
        for directory in self._directories.values():
            _write(directory / "cgroup.procs", str(pid))

    def limit(self, memory_bytes: int, pids: int) -> None:
        if self._set != (memory_bytes, pids):
            self._limit_memory(memory_bytes)
            _write(self._directories["pids"] / "pids.max", str(pids))
            self._set = (memory_bytes, pids)
        os.pwrite(self._peak, b"0", 0)

    def _limit_memory(self, memory_bytes: int) -> None:
        names = ["memory.limit_in_bytes"]
        if self._has_swap:  # memory and swap together may never be below memory alone
            rising = memory_bytes > self._set[0] > 0
            names.insert(0 if rising else 1, "memory.memsw.limit_in_bytes")
        for name in names:
            _write(self._directories["memory"] / name, str(memory_bytes))

    def counts(self) -> Counts:
        kills = _value(self._events, "oom_kill")
        # Newer kernels no longer count in memory.failcnt (seen on 6.18); the peak tells as well.
        hits = int(self.peak_bytes() >= self._set[0] - _CHARGE_BATCH_BYTES)
        return Counts(kills, hits, self.cpu_s())

    def cpu_s(self) -> float:
        return int(os.pread(self._cpu, 32, 0)) / 1e9

    def pids(self) -> list[int]:
        return _pids(self._directories["pids"])

    def peak_bytes(self) -> int:
        return int(os.pread(self._peak, 32, 0))

    def remove(self) -> None:
        for descriptor in (self._events, self._cpu, self._peak):
            os.close(descriptor)
        for directory in self._directories.values():
            _remove_group(directory)
