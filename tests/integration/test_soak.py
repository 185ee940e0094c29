"""The soak itself, in small: it runs to its end, finds all well, and writes its figures."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


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
    assert all(row["last"] > 0 for row in figures["growth"] if "zombies" not in str(row))
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
