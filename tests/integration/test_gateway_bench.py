"""The control-plane benchmark runs, counts every run, and refuses to report when one is missing."""

import json
import subprocess
import sys

import pytest

from rollyard_loadtest.control import BATCH, Case, check_complete
from rollyard_loadtest.control_client import Tally


def test_each_section_reports_runs_latency_and_cpu_by_part() -> None:
    command = [sys.executable, "-m", "rollyard_loadtest.control", "--json", "--runs", "1280",
               "--connections", "4", "--only", "stream,plain"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    rows = json.loads(done.stdout)
    assert [row["runs"] for row in rows] == [20 * BATCH, 64]
    for row in rows:
        assert set(row["cpu_us"]) == {"client", "gateway", "valkey", "worker"}
        assert row["runs_per_s"] > 0
        assert row["p50_ms"] <= row["p99_ms"]


@pytest.mark.parametrize(
    "tally", [Tally(runs=127), Tally(runs=64, wrong=1), Tally(runs=64, refused={503: 1})]
)
def test_a_run_that_is_missing_fails_the_benchmark(tally: Tally) -> None:
    case = Case("x", "/v1/batches", 1)
    check_complete(case, Tally(runs=2 * BATCH), 2)
    with pytest.raises(SystemExit, match="answered ok"):
        check_complete(case, tally, 2)
