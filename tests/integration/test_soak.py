"""The soak itself, in small: it ends well, writes its figures, and would see a slot that leaks."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from changed_guest import change_guest

from rollyard_loadtest.footprint import RESOURCES, slot_bytes, status_of
from rollyard_loadtest.growth import Growth, Sample, growth
from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.machine import open_machine
from rollyard_sandbox.settings import WorkerSettings

DISK = 8 << 20
LIMITS = LimitsSpec(timeout_s=60, cpu_s=None, memory_bytes=64 << 20, disk_bytes=DISK, pids=16,
                    output_bytes=4096)  # fmt: skip
OWN_MEMORY, SHARED_MEMORY = (one for one in RESOURCES if one.name.endswith("beyond new ones"))


def test_a_small_soak_ends_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollyard_loadtest.soak", "--runs", "120", "--samples", "4",
         "--slots", "4", "--output", str(tmp_path / "soak")],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["runs"] == sum(figures["kinds"].values()) == 120
    assert figures["wrong"] == []
    assert figures["restarted"] == 0
    assert len(figures["samples"]) == 5
    assert all(row["flat"] for row in figures["growth"])
    often_none = ("zombies", OWN_MEMORY.name, SHARED_MEMORY.name)
    rows = {row["resource"]["name"]: row for row in figures["growth"]}
    assert all(row["last"] > 0 for name, row in rows.items() if name not in often_none)
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_a_soak_that_is_interrupted_tells_what_it_has(tmp_path: Path) -> None:
    """By Ctrl-C, which goes to the whole group of processes."""
    running = subprocess.Popen(
        [sys.executable, "-m", "rollyard_loadtest.soak", "--runs", "100000", "--samples", "5000",
         "--slots", "4", "--output", str(tmp_path / "soak")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    assert running.stderr is not None
    told = ""
    while "60 of 100000" not in told:
        told += running.stderr.read(1)
    os.killpg(running.pid, signal.SIGINT)
    table, rest = running.communicate(timeout=60)
    assert running.returncode in (0, 1), table + told + rest  # too short to tell of growth
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["interrupted"] and figures["wrong"] == []
    assert 60 <= figures["runs"] < 1000
    assert f"{figures['runs']} runs in " in table
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def memory_of_a_slot() -> Growth:
    """The verdict on a hundred runs in one slot, with another beside it half of the time."""

    async def measured() -> list[Sample]:
        samples: list[Sample] = []
        chosen = WorkerSettings(slots=2, templates="bare")
        async with open_machine(chosen, say=lambda _: None) as machine:
            slot = await machine.pool.acquire("bare", DISK)
            try:
                for runs in range(0, 101, 10):
                    own = slot_bytes(status_of(slot.pid))["own"]
                    samples.append(Sample(runs, float(runs), {OWN_MEMORY.name: own}))
                    if runs == 50:
                        beside = await machine.pool.acquire("bare", DISK, new=True)
                        await machine.pool.release(beside)
                    for number in range(10):
                        spec = RunSpec(
                            run_id=f"{runs + number}", code="print(1)", stdin=None, files={},
                            fetch_files=[], limits=LIMITS, template="bare",
                            on_output_limit="truncate", job="soak",
                        )  # fmt: skip
                        report, _ = await Execution(slot, spec).run()
                        assert report.stdout == "1\n"
            finally:
                await machine.pool.release(slot)
        return samples

    return growth(asyncio.run(measured()), OWN_MEMORY)


def test_a_slot_of_a_hundred_runs_is_flat() -> None:
    assert memory_of_a_slot().over_all == pytest.approx(0, abs=0.1)


def test_a_slot_that_keeps_a_mib_in_a_hundred_runs_is_seen(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    keeps = "self.__dict__.setdefault('kept', []).append(b'x' * 10486)"
    begin = "        self._begun[0] = 0\n        started"
    change_guest(monkeypatch, folder, "slot.py", begin, f"        {keeps}\n{begin}")
    found = memory_of_a_slot()
    assert not found.flat
    assert found.per_10k == pytest.approx(100, rel=0.2)
