"""What must hold on the worker's machine after a run: the ``after`` conditions of the cases.

Each condition returns what is wrong, or "". They are looked at until they hold, for two seconds.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from live_service import Service, canary_faults, is_running
from process_tree import until

WITHIN_S = 2.0
FDS_NOISE, FDS_PER_SLOT = 8, 3  # a slot's socket and two files of its group
THREADS_NOISE = 4
RSS_NOISE_BYTES = 64 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BOX = ("box/work", "box/tmp", "box/shm")


@dataclass
class Before:
    """What is compared with what is afterwards."""

    service: Service
    worker_pid: int = 0
    slots: int = 0
    fds: dict[str, int] = field(default_factory=dict[str, int])
    threads: dict[str, int] = field(default_factory=dict[str, int])
    rss: dict[str, int] = field(default_factory=dict[str, int])
    host_ipc: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, service: Service) -> "Before":
        family = service.family()
        parts = _parts(service)
        return cls(
            service,
            worker_pid=family.worker,
            slots=len(family.slots),
            fds={name: _fds(pid) for name, pid in parts.items()},
            threads={name: _threads(pid) for name, pid in parts.items()},
            rss={name: _rss(pid) for name, pid in parts.items()},
            host_ipc=_host_ipc(),
        )


def faults(before: Before, names: Iterable[str]) -> list[str]:
    """Check conditions by name; ``worker_alive`` and the canaries always."""
    wanted = {"worker_alive", "host_canary_untouched", *names}
    found = dict.fromkeys(wanted, "not looked at")

    def hold() -> bool:
        for name in wanted:
            found[name] = _CONDITIONS[name](before)
        return not any(found.values())

    until(hold, timeout_s=WITHIN_S)
    return [f"{name}: {text}" for name, text in sorted(found.items()) if text]


def _parts(service: Service) -> dict[str, int]:
    """The long-lived processes, by name: those whose fds, threads and memory must not grow."""
    family = service.family()
    parts = {name: service.pids[name] for name in ("supervisor", "gateway", "valkey")}
    parts["worker"] = family.worker
    for number, template in enumerate(sorted(family.templates, key=lambda one: one.pid)):
        parts[f"template-{number}"] = template.pid
    return parts


def _fds(pid: int) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return 0


def _threads(pid: int) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    return 0


def _rss(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _host_ipc() -> set[str]:
    return {
        f"{kind} {line.split()[0]} {line.split()[1]}"
        for kind in ("shm", "sem", "msg")
        for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
    }


def _worker_alive(before: Before) -> str:
    now = before.service.worker_pid
    if now != before.worker_pid or not is_running(now):
        return f"worker was {before.worker_pid}, is {now}"
    return ""


def _next_call_ok(before: Before) -> str:
    began = time.monotonic()
    result = before.service.client.run("print('next')", timeout_s=30)
    took = time.monotonic() - began
    if (result.outcome, result.stdout) != ("ok", "next\n") or took > WITHIN_S:
        return f"the next run: {result.outcome} after {took:.1f} s, {result.message}"
    return ""


def _no_process_left(before: Before) -> str:
    programs = before.service.family().programs
    return ", ".join(f"{one.name} {one.pid} ({one.state})" for one in programs)


def _no_cgroup_left(before: Before) -> str:
    leaves = len(before.service.leaves())
    allowed = 3 * before.service.slots  # memory, pids and cpu have a directory each
    return f"{leaves} groups for {before.service.slots} slots" if leaves > allowed else ""


def _no_tmp_left(before: Before) -> str:
    """Nothing in any slot's own file system, and no System V object on the host."""
    left = sorted(_host_ipc() - before.host_ipc)
    for slot in before.service.family().slots:
        for place in _BOX:
            with contextlib.suppress(FileNotFoundError):  # the slot went meanwhile
                left += [str(path) for path in Path(f"/proc/{slot.pid}/root/{place}").iterdir()]
    return ", ".join(left[:10])


def _no_listener_left(before: Before) -> str:
    listening = "0A"
    left: list[str] = []
    for slot in before.service.family().slots:
        for kind in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{slot.pid}/net/{kind}").read_text().splitlines()[1:]
                left += [line for line in lines if line.split()[3] == listening]
        with contextlib.suppress(OSError):
            left += Path(f"/proc/{slot.pid}/net/unix").read_text().splitlines()[1:]
    return "; ".join(left[:5])


def _fds_stable(before: Before) -> str:
    before.service.client.close()  # its idle connections are ours, not a leak; it opens new ones
    more_slots = max(0, len(before.service.family().slots) - before.slots)
    allowed = FDS_NOISE + FDS_PER_SLOT * more_slots
    return _grown(before.fds, {n: _fds(p) for n, p in _parts(before.service).items()}, allowed)


def _pids_stable(before: Before) -> str:
    now = {name: _threads(pid) for name, pid in _parts(before.service).items()}
    return _grown(before.threads, now, THREADS_NOISE) or _no_process_left(before)


def _rss_stable(before: Before) -> str:
    now = {name: _rss(pid) for name, pid in _parts(before.service).items()}
    return _grown(before.rss, now, RSS_NOISE_BYTES)


def _grown(before: dict[str, int], now: dict[str, int], allowed: int) -> str:
    grown = {
        name: f"{name} from {before[name]} to {value}"
        for name, value in now.items()
        if value > before.get(name, value) + allowed
    }
    return ", ".join(grown.values())


def _redis_clean(before: Before) -> str:
    return ", ".join(before.service.unfinished_keys()[:10])


def _host_canary_untouched(before: Before) -> str:
    return ", ".join(canary_faults())


_CONDITIONS: dict[str, Callable[[Before], str]] = {
    "worker_alive": _worker_alive,
    "next_call_ok": _next_call_ok,
    "no_process_left": _no_process_left,
    "no_cgroup_left": _no_cgroup_left,
    "no_tmp_left": _no_tmp_left,
    "no_listener_left": _no_listener_left,
    "fds_stable": _fds_stable,
    "pids_stable": _pids_stable,
    "rss_stable": _rss_stable,
    "redis_clean": _redis_clean,
    "host_canary_untouched": _host_canary_untouched,
}
