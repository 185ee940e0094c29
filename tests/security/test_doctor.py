"""The self-check notices a wall that is not there, and a worker then refuses."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from changed_guest import change_guest
from live_service import Service
from requirements import requirement

from rollyard_sandbox import cgroups, jail, machine
from rollyard_sandbox.guest import child
from rollyard_sandbox.jail import JailError
from rollyard_sandbox.machine import open_machine
from rollyard_sandbox.probe import WHAT
from rollyard_sandbox.settings import WorkerSettings
from rollyard_sandbox.slots import SlotLost

Patch = pytest.MonkeyPatch
SETTINGS = WorkerSettings(slots=2, templates="bare")
NO_CGROUPS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.unshare(os.CLONE_NEWNS)
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
assert libc.mount(b"none", b"/sys/fs/cgroup", b"tmpfs", 0, None) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


async def _failing() -> list[str]:
    """Every layer that does not work, required or not."""
    async with open_machine(SETTINGS, say=lambda _: None) as machine:
        return [layer.name for layer in machine.layers if not layer.works]


async def _missing() -> list[str]:
    async with open_machine(SETTINGS, say=lambda _: None) as opened:
        assert {layer.name for layer in opened.layers} == WHAT.keys()
        return opened.missing


def _examine() -> list[str]:
    """Missing layers; everything, where not even a slot can be made."""
    try:
        return asyncio.run(_missing())
    except (SlotLost, JailError):
        return list(WHAT)


def _config(patch: Patch, **fields: Any) -> None:
    real = jail.configuration

    def changed(*arguments: Any) -> Any:
        return dataclasses.replace(real(*arguments), **fields)

    patch.setattr(jail, "configuration", changed)


def _no_user(patch: Patch, tmp: Path) -> None:
    change_guest(patch, tmp, "child.py", "os.setresuid(uid, uid, uid)", "pass")


def _no_pid_namespace(patch: Patch, tmp: Path) -> None:
    change_guest(patch, tmp, "template.py", "os.unshare(os.CLONE_NEWPID)", "pass")


def _no_host_name(patch: Patch, tmp: Path) -> None:
    _config(patch, hostname="elsewhere")


def _no_network_namespace(patch: Patch, tmp: Path) -> None:
    _config(patch, clone_newnet=False)
    change_guest(patch, tmp, "slot.py", " | os.CLONE_NEWNET", "")


def _no_dropped_capabilities(patch: Patch, tmp: Path) -> None:
    change_guest(patch, tmp, "slot.py", "kernel.close_capabilities()", "pass")


def _no_new_privileges(patch: Patch, tmp: Path) -> None:
    # nsjail sets it for its own filter in any case.
    _config(patch, disable_no_new_privs=True, seccomp_string=[])


def _no_tree_filter(patch: Patch, tmp: Path) -> None:
    _config(patch, seccomp_string=[])


def _no_slot_filter(patch: Patch, tmp: Path) -> None:
    change_guest(patch, tmp, "slot.py", "if filter.supported():", "if False:")


def _no_closed_descriptors(patch: Patch, tmp: Path) -> None:
    change_guest(patch, tmp, "child.py", "os.closerange(3, 1 << 30)", "pass")


def _no_rlimits(patch: Patch, tmp: Path) -> None:
    change_guest(patch, tmp, "slot.py", "resource.setrlimit(what, (lowered, lowered))", "pass")


def _no_landlock(patch: Patch, tmp: Path) -> None:
    change_guest(patch, tmp, "slot.py", "landlock.restrict()", "pass")


def _no_process_limit(patch: Patch, tmp: Path) -> None:
    line = "resource.setrlimit(resource.RLIMIT_NPROC, (limits.pids, limits.pids))"
    change_guest(patch, tmp, "child.py", line, "pass")


def _no_size(patch: Patch, tmp: Path) -> None:
    change_guest(patch, tmp, "box.py", "size={size_bytes}", "size={4 * size_bytes}")


def _no_clean_environment(patch: Patch, tmp: Path) -> None:
    name = "CLOUD_API_KEY"
    assert name not in child.ENVIRONMENT
    change_guest(patch, tmp, "child.py", '"USER": "runner",', f'"USER": "runner", "{name}": "x",')


def _no_groups(patch: Patch, tmp: Path) -> None:
    def none(_: object) -> None:
        return None

    patch.setattr(machine, "_cgroups", none)


def _no_memory_limit(patch: Patch, tmp: Path) -> None:
    real = cgroups._write  # pyright: ignore[reportPrivateUsage]

    def write(path: Path, value: str) -> None:
        if path.name not in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"):
            real(path, value)

    patch.setattr(cgroups, "_write", write)


def _no_pids_limit(patch: Patch, tmp: Path) -> None:
    _no_process_limit(patch, tmp)
    real = cgroups._write  # pyright: ignore[reportPrivateUsage]

    def write(path: Path, value: str) -> None:
        if path.name != "pids.max":
            real(path, value)

    patch.setattr(cgroups, "_write", write)


REMOVED: dict[Callable[[Patch, Path], None], str] = {
    _no_user: "user",
    _no_pid_namespace: "pid",
    _no_host_name: "uts",
    _no_network_namespace: "network",
    _no_dropped_capabilities: "capabilities",
    _no_new_privileges: "no_new_privileges",
    _no_tree_filter: "seccomp_slot",  # counted together: one of the two is not there
    _no_slot_filter: "seccomp_slot",
    _no_closed_descriptors: "descriptors",
    _no_rlimits: "rlimits",
    _no_process_limit: "rlimits",
    _no_size: "tmpfs",
    _no_clean_environment: "environment",
    _no_groups: "cgroup_memory",
    _no_memory_limit: "cgroup_memory",
    _no_pids_limit: "cgroup_pids",
}


@requirement("doctor.sees")
def test_nothing_is_missing_here() -> None:
    assert asyncio.run(_missing()) == []


@requirement("doctor.sees", "wall.landlock")
def test_a_missing_second_wall_is_told_and_forgiven(monkeypatch: Patch) -> None:
    with tempfile.TemporaryDirectory(dir=SETTINGS.state_dir, prefix="test-") as tmp:
        _no_landlock(monkeypatch, Path(tmp))
        assert asyncio.run(_failing()) == ["landlock"]


@requirement("doctor.sees")
def test_what_is_only_slower_is_told_with_its_price() -> None:
    command = [sys.executable, "-P", "-m", "rollyard_sandbox.doctor"]
    env = {**os.environ, "PATH": "/nonexistent"}  # no compiler for what makes forks cheap
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Every layer works" not in done.stdout
    verdict, price = done.stdout.splitlines()[-2:]
    assert verdict.startswith("A worker will start") and "warm_memory" in verdict
    assert price.startswith("Without warm_memory: ") and "CPU" in price


@requirement("doctor.sees")
@pytest.mark.parametrize("remove", REMOVED, ids=lambda one: one.__name__.strip("_"))
def test_a_removed_layer_is_noticed(
    remove: Callable[[Patch, Path], None], monkeypatch: Patch
) -> None:
    state = SETTINGS.state_dir  # where the jail's users can read
    with tempfile.TemporaryDirectory(dir=state, prefix="test-") as tmp:
        remove(monkeypatch, Path(tmp))
        assert REMOVED[remove] in _examine()


def _without_cgroups(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NO_CGROUPS, "-m", *command],
        input="print(6 * 7)", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@requirement("doctor.refuses")
def test_a_worker_without_a_layer_does_not_start() -> None:
    done = _without_cgroups("rollyard_sandbox", "--templates", "bare", "--slots", "1")
    assert done.returncode == 3
    assert "cgroup_memory, cgroup_pids" in done.stderr and "--allow-degraded" in done.stderr


@requirement("doctor.refuses")
def test_the_doctor_says_it_in_words() -> None:
    done = _without_cgroups("rollyard_sandbox.doctor")
    assert done.returncode == 1
    refusal = done.stdout.splitlines()[-1]
    assert "cgroup_memory, cgroup_pids" in refusal and "--allow-degraded" in refusal


@requirement("doctor.refuses")
def test_the_doctor_says_which() -> None:
    done = _without_cgroups("rollyard_sandbox.doctor", "--json")
    assert done.returncode == 1
    layers = json.loads(done.stdout)["layers"]
    assert {one["name"] for one in layers if not one["works"]} == {"cgroup_memory", "cgroup_pids"}


@requirement("doctor.refuses")
def test_allowed_to_start_it_says_so_in_every_result(service: Service) -> None:
    done = _without_cgroups("rollyard.cli", "run", "-", "--local", "--allow-degraded", "--json")
    result = json.loads(done.stdout)
    assert (result["stdout"], result["degraded"]) == ("42\n", ["cgroup_memory", "cgroup_pids"])
    assert service.client.run("pass").degraded == []
