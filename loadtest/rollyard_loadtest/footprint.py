"""What a local service occupies at one moment, part by part, read from /proc and Valkey."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from rollyard_loadtest.processes import descendants

_MIB = 1 << 20
_MEMORY = {"Rss": "RSS", "Pss": "PSS"}
_SLOT_MEMORY = {"RssAnon": "own", "RssShmem": "shared"}


@dataclass(frozen=True)
class Resource:
    """One quantity. ``noise``: how much it may rise over a whole soak; None: shown, not judged."""

    name: str
    noise: float | None
    unit: str = ""

    @property
    def scale(self) -> float:
        return _MIB if self.unit == "MiB" else 1.0


def _parts(name: str, *, memory: float, descriptors: float = 6) -> tuple[Resource, ...]:
    return (
        Resource(f"{name} RSS", memory, "MiB"),
        # Falls and rises with what else on the machine maps the same files.
        Resource(f"{name} PSS", None, "MiB"),
        Resource(f"{name} descriptors", descriptors),
        Resource(f"{name} threads", 2),
    )


# Noise in the unit shown. Descriptors of the worker: six for each slot, and slots come and go.
RESOURCES = (
    *_parts("worker", memory=6, descriptors=30),
    *_parts("gateway", memory=6),
    *_parts("valkey", memory=24),
    *_parts("supervisor", memory=3),
    Resource("templates RSS", 6, "MiB"),
    Resource("templates descriptors", 2),
    Resource("templates threads", 0.5),
    Resource("templates and slots PSS", None, "MiB"),
    *_parts("SDK", memory=12, descriptors=10),
    # Results are kept for a minute: with the rate of runs their number goes up and down.
    Resource("valkey used_memory", 16, "MiB"),
    # Of all slots. A used one has written up to 0.1 more than a new one, and comes and goes.
    Resource("slots' own memory beyond new ones", 0.4, "MiB"),
    # What of the template's memory file they happen to have touched is in it.
    Resource("slots' shared memory beyond new ones", 2, "MiB"),
    Resource("a slot's descriptors", 1),
    Resource("a slot's mounts", 0.5),
    Resource("slots", 4),
    Resource("zombies", 2),
    Resource("cgroup directories", 16),
    Resource("worker mounts", 0.5),
    Resource("template mounts", 0.5),
    Resource("temporary files", 4),
)


@dataclass(frozen=True)
class Family:
    """A worker's descendants, told apart by the depth of their PID namespace."""

    templates: list[int]
    slots: list[int]
    programs: list[int]
    zombies: list[int]


def family(worker: int) -> Family:
    found = Family([], [], [], [])
    own = len(status_of(os.getpid()).get("NSpid", "").split())
    for pid in descendants(worker)[1:]:
        status = status_of(pid)
        inside = status.get("NSpid", "").split()
        if status.get("State", "").startswith("Z"):
            found.zombies.append(pid)
        elif len(inside) == own + 1:
            found.templates.append(pid)
        elif len(inside) == own + 2:
            (found.slots if inside[-1] == "1" else found.programs).append(pid)
    return found


class Footprint:
    """Takes samples of one service."""

    def __init__(self, pids: dict[str, int], directory: Path) -> None:
        self._pids = pids
        self._directory = directory
        self._new_slots: dict[int, dict[str, int]] = {}  # bytes, by their template's pid

    def programs(self) -> int:
        """Processes of runs; none, when nothing is in flight."""
        return len(family(self._pids["worker"]).programs)

    def sample(self) -> dict[str, float]:
        """All of RESOURCES, by name; bytes are bytes."""
        pids = self._pids
        found = family(pids["worker"])
        values: dict[str, float] = {}
        parts = {
            **{name: [pids[name]] for name in ("worker", "gateway", "valkey", "supervisor")},
            "templates": found.templates,
            "SDK": [os.getpid()],
        }
        for name, members in parts.items():
            for what, amount in _sizes(members).items():
                values[f"{name} {what}"] = amount
        slots = _sizes(found.slots)
        many = max(1, len(found.slots))
        values["templates and slots PSS"] = values["templates PSS"] + slots["PSS"]
        for name, amount in self._beyond_new(found.slots).items():
            values[f"slots' {name} memory beyond new ones"] = amount
        values["a slot's descriptors"] = slots["descriptors"] / many
        values["a slot's mounts"] = max(map(_mounts, found.slots), default=0)
        values["slots"] = len(found.slots)
        values["zombies"] = len(found.zombies)
        values["valkey used_memory"] = _used_memory(self._directory / "valkey.sock")
        values["cgroup directories"] = _groups(pids["worker"])
        values["worker mounts"] = _mounts(pids["worker"])
        values["template mounts"] = max(map(_mounts, found.templates), default=0)
        values["temporary files"] = sum(1 for _ in self._directory.rglob("*"))
        return {resource.name: values[resource.name] for resource in RESOURCES}

    def _beyond_new(self, slots: list[int]) -> dict[str, int]:
        """Bytes of all slots by kind, each slot less what the first one of its template had.

        Slots of two templates differ by half a MiB, and which of them live changes all the time.
        """
        beyond = dict.fromkeys(_SLOT_MEMORY.values(), 0)
        for pid in slots:
            status = status_of(pid)
            if "RssAnon" in status:  # a zombie has none
                own = slot_bytes(status)
                new = self._new_slots.setdefault(int(status["PPid"]), own)
                for kind in beyond:
                    beyond[kind] += own[kind] - new[kind]
        return beyond


def slot_bytes(status: dict[str, str]) -> dict[str, int]:
    """Bytes of a slot by kind, own (written) and shared, from /proc/PID/status.

    Not by private pages: what a slot maps of its template's memory file counts as private, 2.4 MiB,
    while it is the only slot of the template.
    """
    return {kind: int(status[name].split()[0]) * 1024 for name, kind in _SLOT_MEMORY.items()}


def _sizes(pids: list[int]) -> dict[str, float]:
    sizes: dict[str, float] = dict.fromkeys((*_MEMORY.values(), "descriptors", "threads"), 0.0)
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if what := _MEMORY.get(name):
                    sizes[what] += int(rest.split()[0]) * 1024
            sizes["descriptors"] += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            sizes["threads"] += sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    return sizes


def status_of(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; none, where the process is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}
    return {}


def _mounts(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
    return 0


def _groups(worker: int) -> int:
    """Directories below the worker's own control group, in all hierarchies."""
    name = f"/rollyard-{worker}/"
    return sum(name in f"{place}/" for place, _, _ in os.walk("/sys/fs/cgroup"))


def _used_memory(path: Path) -> float:
    """``used_memory`` of INFO, over a connection of its own."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(b"INFO memory\r\nQUIT\r\n")
        answer = b""
        while data := connection.recv(65536):
            answer += data
    for line in answer.decode().splitlines():
        if line.startswith("used_memory:"):
            return float(line.partition(":")[2])
    raise ValueError("INFO of Valkey has no used_memory")
