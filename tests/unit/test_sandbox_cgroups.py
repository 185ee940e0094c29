"""Control groups of version 2, on a tree of plain files: what is written where, and read back.

Machines of the tests may have version 1, which the security tests use as it is.
"""

import os
import shutil
from pathlib import Path

import pytest

from rollyard_sandbox import cgroups
from rollyard_sandbox.cgroups import Counts, V1Cgroups, V2Cgroups

NOBODY = 2**22 + 1  # past the largest pid there can be: removal kills what a group lists
OWN = "/system.slice/worker.service"
FILES = {
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "cgroup.kill": "",
    "cgroup.type": "domain\n",
    "memory.max": "",
    "memory.swap.max": "",
    "pids.max": "",
    "cpu.weight": "100",
    "cpu.shares": "1024",
    "memory.events": "low 0\nhigh 0\nmax 5\noom 1\noom_kill 3\noom_group_kill 0\n",
    "memory.events.local": "max 4\noom 2\noom_kill 1\n",
    "memory.peak": "4096\n",
    "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount point where, as in the kernel's, a new group has its files at once."""
    real_mkdir, real_rmdir = Path.mkdir, Path.rmdir

    def mkdir(self: Path, *arguments: object, **options: object) -> None:
        real_mkdir(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        if self.is_relative_to(tmp_path):
            for name, content in FILES.items():
                if not (self / name).exists():
                    (self / name).write_text(content)

    def rmdir(self: Path) -> None:
        shutil.rmtree(self) if self.is_relative_to(tmp_path) else real_rmdir(self)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)
    group = tmp_path / OWN.lstrip("/")
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    return tmp_path


def _open(tree: Path, own: str = OWN) -> V2Cgroups:
    return V2Cgroups({"": tree}, {"": own})


def test_the_worker_moves_to_a_leaf_of_its_own_and_passes_controllers_on(tree: Path) -> None:
    group = tree / OWN.lstrip("/")
    (group / "cgroup.procs").write_text(f"{NOBODY}\n{NOBODY + 1}\n")
    opened = _open(tree)
    moved = int((group / "worker" / "cgroup.procs").read_text())  # the kernel takes one a write
    assert moved in (NOBODY, NOBODY + 1)
    parent = group / f"rollyard-{os.getpid()}"
    for place in (group, parent):
        assert (place / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    opened.close()
    assert not parent.exists()


def test_in_a_container_the_root_is_none(tree: Path) -> None:
    """With a cgroup namespace of its own it is called "/", and may not hold processes either."""
    for name, content in FILES.items():
        (tree / name).write_text(content)
    (tree / "cgroup.controllers").write_text("memory pids\n")
    (tree / "cgroup.procs").write_text(f"{NOBODY}\n")
    opened = _open(tree, own="/")
    assert (tree / "worker" / "cgroup.procs").read_text() == str(NOBODY)
    opened.close()


def test_on_the_machine_s_root_nothing_moves(tree: Path) -> None:
    (tree / "cgroup.controllers").write_text("memory pids\n")
    (tree / "cgroup.procs").write_text(f"{NOBODY}\n")
    (tree / "cgroup.subtree_control").touch()
    opened = _open(tree, own="/")
    assert not (tree / "worker").exists()
    opened.close()


def test_a_leaf_has_limits_no_swap_and_a_share(tree: Path) -> None:
    leaf = _open(tree).leaf("slot-1")
    place = tree / OWN.lstrip("/") / f"rollyard-{os.getpid()}" / "slot-1"
    leaf.add(NOBODY)
    leaf.limit(64 << 20, 17)
    read = {name: (place / name).read_text() for name in FILES}
    assert read["cgroup.procs"] == str(NOBODY)
    assert (read["memory.max"], read["pids.max"]) == (str(64 << 20), "17")
    assert (read["memory.swap.max"], read["cpu.weight"]) == ("0", "100")
    assert leaf.counts() == Counts(oom_kills=3, limit_hits=2, cpu_s=2.5)
    assert leaf.pids() == [NOBODY]
    leaf.remove()
    assert not place.exists()


def test_all_slots_together_weigh_as_much_as_a_process_on_each_core(tree: Path) -> None:
    """Not as one process: a neighbour would leave them half a core, whatever they run."""
    cores = len(os.sched_getaffinity(0))
    opened = _open(tree)
    parent = tree / OWN.lstrip("/") / f"rollyard-{os.getpid()}"
    assert int((parent / "cpu.weight").read_text()) == 100 * cores
    opened.close()


def test_the_same_with_version_1(tree: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    for cpu in ("cpu", "cpuacct"):  # usually one hierarchy, here and there two
        places = {name: tree / name for name in ("memory", "pids", "cpuacct")}
        mounts = {**places, "cpu": tree / cpu}
        for place in mounts.values():
            place.mkdir(exist_ok=True)
        opened = V1Cgroups(mounts, dict.fromkeys(mounts, "/"))
        shares = tree / cpu / f"rollyard-{os.getpid()}" / "cpu.shares"
        assert int(shares.read_text()) == 1024 * cores
        opened.close()


def test_limits_are_written_only_when_they_change(tree: Path) -> None:
    leaf = _open(tree).leaf("slot-1")
    place = tree / OWN.lstrip("/") / f"rollyard-{os.getpid()}" / "slot-1"
    leaf.limit(1000, 10)
    (place / "memory.max").write_text("untouched")
    leaf.limit(1000, 10)
    assert (place / "memory.max").read_text() == "untouched"
    leaf.limit(1000, 11)
    assert (place / "memory.max").read_text().startswith("1000")
    leaf.remove()


def test_without_its_controllers_it_cannot_be_used(tree: Path) -> None:
    group = tree / OWN.lstrip("/")
    (group / "cgroup.controllers").write_text("cpu io\n")
    with pytest.raises(OSError, match="lacks the controllers memory, pids"):
        _open(tree)


def test_without_the_cpu_controller_there_is_no_share(tree: Path) -> None:
    (tree / OWN.lstrip("/") / "cgroup.controllers").write_text("memory pids\n")
    leaf = _open(tree).leaf("slot-1")
    assert (tree / OWN.lstrip("/") / "cgroup.subtree_control").read_text() == "+memory +pids"
    leaf.remove()


def test_what_a_killed_worker_left_is_swept_and_a_living_one_is_not(tree: Path) -> None:
    group = tree / OWN.lstrip("/")
    gone, alive, other = (group / f"rollyard-{name}" for name in (NOBODY, os.getppid(), "x"))
    for place in (gone, gone / "slot-1", alive, other):
        place.mkdir()
    _open(tree).close()
    assert (gone.exists(), alive.exists(), other.exists()) == (False, True, True)


def test_where_neither_version_serves_both_reasons_are_said(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / OWN.lstrip("/") / "cgroup.controllers").write_text("")
    monkeypatch.setattr(cgroups, "_mounts", lambda: {"": tree})
    monkeypatch.setattr(cgroups, "_own_groups", lambda: {"": OWN})
    with pytest.raises(OSError, match=r"version 2: .*lacks.*version 1: "):
        cgroups.open_cgroups()
