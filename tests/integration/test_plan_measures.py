"""`rollyard plan` against a real service: what it measures makes sense, and it plans from that."""

import json
import subprocess
import sys
from pathlib import Path

from rollyard_loadtest import scenario
from rollyard_loadtest.costs import load_costs

MIX = """schema = 1
name = "two-kinds"
title = "Short ones and sleepers"
[load]
arrivals = "closed"
in_flight = 8
[[programs]]
kind = "print"
weight = 3
[[programs]]
kind = "sleep"
s = [0.3, 0.3]
"""


def plan(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollyard.cli", "plan", "--mix", "mix.toml", "--quick",
         "--slots", "8", "--costs", "costs.json", "--json", *words],
        cwd=directory, capture_output=True, text=True, timeout=110,
    )  # fmt: skip


def test_it_measures_plans_and_compares(tmp_path: Path) -> None:
    (tmp_path / "mix.toml").write_text(MIX)
    done = plan("--in-flight", "500", "--p99", "2", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["p99_s"] <= 2 and figures["worker_cores"] >= 1
    assert "programs of kind sleep" in done.stderr

    costs = load_costs(tmp_path / "costs.json", scenario.load(str(tmp_path / "mix.toml")))
    small, asleep = costs.kinds
    assert (small.name, asleep.name) == ("print", "sleep")
    assert min(small.cpu_ms) > 0 and small.sleep_ms == [0.0]
    assert min(asleep.sleep_ms) > 200 > max(asleep.own_ms)
    for part in (costs.mixed, costs.single, costs.batched):
        assert part.gateway_ms > 0 and part.valkey_ms > 0
    assert costs.batched.gateway_ms < costs.single.gateway_ms
    assert costs.memory.slot_bytes["bare"] > 0
    assert costs.memory.gateway_bytes > 1 << 20
    assert costs.crowding >= 1

    compared = plan("--validate", directory=tmp_path)
    assert compared.returncode in (0, 1), compared.stderr  # 1: a figure is off; that is no test's
    rows = json.loads(compared.stdout)
    assert [row["name"] for row in rows] == ["p50", "p99", "runs/s"] * 4
    assert all(row["measured"] > 0 and row["simulated"] > 0 for row in rows)
