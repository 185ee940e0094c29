"""Chaos itself, in small: every kind of fault once, and everything accounted for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

from rollyard_loadtest.chaos_faults import FaultKind


def test_a_small_chaos_loses_nothing(tmp_path: Path) -> None:
    # A process of its own: it adopts orphans, and must find none but those of its parts.
    done = subprocess.run(
        [sys.executable, "-m", "rollyard_loadtest.chaos", "--minutes", "0.33", "--every-s", "2.0",
         "--lease-s", "2", "--templates", "bare", "--slots", "4", "--callers", "12",
         "--shards", "2", "--seed", "3", "--output", str(tmp_path / "chaos")],
        capture_output=True, text=True, timeout=115, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures = json.loads((tmp_path / "chaos.json").read_text())
    counts = figures["counts"]
    assert counts["answered"] == counts["asked"] == len(figures["runs"]) > 0
    never = ("lost", "duplicated", "wrong", "infra_error_unexplained", "left_over")
    assert {name: counts[name] for name in never} == dict.fromkeys(never, 0)
    assert {fault["kind"] for fault in figures["faults"]} == set(get_args(FaultKind))
    assert {run[2] for run in figures["runs"]} == {"call", "twin", "late", "wire"}
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in (tmp_path / "chaos.html").read_text()
