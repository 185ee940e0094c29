"""The soak itself, in small: it runs to its end, finds all well, and writes its figures."""

import json
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
