"""``rollyard bench`` as users run it, against real services, in small."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from process_tree import below, until

from rollyard_loadtest.figures import BenchFigures
from rollyard_loadtest.histogram import Latencies

if TYPE_CHECKING:
    from conftest import Service

SHORT = ("--duration-s", "1", "--warmup-s", "0.5")


def bench(*arguments: str, code: int = 0) -> str:
    """Run the command; return what it wrote for people."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rollyard.cli", "bench", *arguments],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def figures_of(prefix: Path) -> BenchFigures:
    return BenchFigures.model_validate_json(prefix.with_name(f"{prefix.name}.json").read_text())


def _page(prefix: Path) -> str:
    page = prefix.with_name(f"{prefix.name}.html").read_text()
    # Nothing is loaded from anywhere: the file is complete in itself.
    assert not re.search(r"<script|<link|<img|@import|src=|url\((?!#)", page)
    assert "$" not in re.sub(r"<pre>.*?</pre>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    return page


def test_a_mixed_load_is_answered_rightly_and_reported(service: "Service", tmp_path: Path) -> None:
    prefix = tmp_path / "mixed"
    said = bench("math-rollout", "--url", service.address, "--in-flight", "8",
                 "--duration-s", "3", "--warmup-s", "0.5", "--clients", "2",
                 "--output", str(prefix))  # fmt: skip
    assert "0 wrong, 0 lost" in said
    figures = figures_of(prefix)
    [stage] = figures.stages
    assert figures.schema_version == "rollyard-bench/1"
    assert stage.target == "sdk"
    assert stage.good == stage.due == sum(stage.outcomes.values()) > 0
    assert sum(kind.runs for kind in stage.kinds.values()) == stage.good
    assert stage.kinds["loop"].cpu_ms > 0
    latencies = Latencies.decoded(stage.histogram)
    assert len(latencies) == stage.good
    assert latencies.quantile_s(0.5) == stage.p50_s
    assert sum(second.good for second in stage.seconds) >= stage.good
    assert figures.machine.cores >= 1
    assert figures.scenario["shares"]["loop"] == pytest.approx(0.6)
    page = _page(prefix)
    assert page.count("<svg") == 4
    for part in ("Latency", "Over time", "Outcomes", "By kind of program", "What a run costs",
                 "answers right, none lost", "How this was measured", "sympy"):  # fmt: skip
        assert part in page


def test_a_wrong_verdict_fails_the_load_test(service: "Service", tmp_path: Path) -> None:
    programs = tmp_path / "mine.jsonl"
    right = {"code": "print(1)", "stdout": "1\n", "kind": "right"}
    wrong = {"code": "print(1)", "stdout": "2\n", "kind": "wrongly-expected"}
    programs.write_text(f"{json.dumps(right)}\n{json.dumps(wrong)}\n")
    prefix = tmp_path / "mine"
    said = bench(str(programs), "--url", service.address, "--in-flight", "4", *SHORT,
                 "--output", str(prefix), code=1)  # fmt: skip
    assert "wrongly-expected: stdout is '1\\n' instead of '2\\n'" in said
    [stage] = figures_of(prefix).stages
    assert stage.wrong > 0
    assert set(stage.kinds) == {"right"}
    assert "wrongly-expected" in _page(prefix)


def test_a_training_step_on_null_workers(nothing_left: None, tmp_path: Path) -> None:
    prefix = tmp_path / "burst"
    said = bench("burst-45k", "--null", "--rollouts", "2000", "--turns", "1", "--gateways", "2",
                 "--clients", "2", "--output", str(prefix))  # fmt: skip
    assert "goal p50_s 1" in said
    figures = figures_of(prefix)
    [stage] = figures.stages
    assert figures.null_workers
    assert stage.good == stage.due == 2000
    assert stage.lost == stage.wrong == 0
    assert {"gateway", "valkey", "worker", "client"} <= set(stage.cpu_ms_per_run)
    assert stage.processes["gateway"] == 2
    assert "no program was run" in _page(prefix)


def test_a_sweep_of_the_users_own(service: "Service", tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'schema = 1\nname = "mine"\ntitle = "More and more"\n'
        '[load]\narrivals = "poisson"\nduration_s = 1\nwarmup_s = 0\n'
        '[sweep]\nparameter = "of_capacity"\nvalues = [0.5, 1.5]\ncapacity_in_flight = 4\n'
        '[goals]\ngoodput_share = 0.1\n[[programs]]\nkind = "print"\n'
    )
    prefix = tmp_path / "sweep"
    bench(str(mine), "--url", service.address, "--output", str(prefix))
    capacity, half, more = figures_of(prefix).stages
    assert capacity.load["arrivals"] == "closed"
    assert half.load["rate_per_s"] == pytest.approx(0.5 * capacity.goodput_per_s)
    assert more.load["rate_per_s"] == pytest.approx(1.5 * capacity.goodput_per_s)
    assert more.due > half.due
    page = _page(prefix)
    assert "Goodput and offered load" in page
    assert page.count("<details>") == 4  # each stage over time, and the scenario


def test_other_dialects_are_measured_with_the_same_programs(
    service: "Service", tmp_path: Path
) -> None:
    prefix, mine = tmp_path / "compare", tmp_path / "mine.toml"
    mine.write_text(
        'schema = 1\nname = "mine"\ntitle = "Mine"\n[load]\narrivals = "closed"\nin_flight = 4\n'
        '[[programs]]\nkind = "print"\n[[programs]]\nkind = "raise"\n[[programs]]\nkind = "numpy"\n'
        '[[programs]]\nkind = "code"\ntitle = "exit"\ncode = "raise SystemExit(3)"\n'
        'outcome = "error"\n[[programs]]\nkind = "code"\ntitle = "input"\n'
        'code = "print(input())"\nstdin = "{{n}}\\n"\nstdout = "{{n}}\\n"\n'
        '[[programs]]\nkind = "endless"\ntimeout_s = [0.2, 0.3]\nweight = 0.2\n'
    )
    url = service.address
    # code-judge has no time limit in its requests, so its programs must end by themselves.
    said = bench("compare", "--native", url, "--sandboxfusion", url, "--scenario", str(mine),
                 "--rounds", "2", "--block-s", "0.6", "--warmup-s", "0.2",
                 "--output", str(prefix))  # fmt: skip
    said += bench("compare", "--native", url, "--codejudge", url, "--scenario", "small",
                  "--rounds", "1", "--block-s", "1", "--warmup-s", "0.2", "--codejudge-batch", "4",
                  "--half-load", "--output", str(tmp_path / "judge"))  # fmt: skip
    assert "SandboxFusion" in said and "code-judge" in said
    figures = figures_of(prefix)
    assert [stage.target for stage in figures.stages] == ["sdk", "sandboxfusion"] * 2
    assert all(stage.good == stage.due > 0 for stage in figures.stages)
    judged = figures_of(tmp_path / "judge").stages
    assert [stage.target for stage in judged] == ["sdk", "codejudge"] * 2
    assert all(stage.good == stage.due > 0 for stage in judged[:2])
    assert all(stage.load["arrivals"] == "poisson" for stage in judged[2:])
    assert "Side by side" in _page(prefix)
    assert "runs/s against code-judge" in _page(tmp_path / "judge")


def test_an_interrupted_load_test_leaves_nothing(nothing_left: None, tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-P", "-m", "rollyard.cli", "bench", "small", "--null",
         "--duration-s", "600", "--output", str(tmp_path / "interrupted")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    client = f"{sys.executable} -P -m rollyard_loadtest.client"

    def loading() -> bool:
        commands = (Path(f"/proc/{one.pid}/cmdline") for one in below(running.pid))
        return any(_command(path) == client for path in commands)

    try:
        assert until(loading, timeout_s=60)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    finally:
        running.kill()
        running.wait()


def _command(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()
    return ""


def test_what_is_missing_is_said(service: "Service", tmp_path: Path) -> None:
    assert "Did you mean 'small'?" in bench("smal", code=2)
    assert "--rate-per-s does not go with" in bench("small", "--rate-per-s", "5", code=2)
    assert "--null is for a service" in bench("small", "--null", "--url", "http://x", code=2)
    nowhere = f"unix://{tmp_path}/nowhere.sock"
    assert "rollyard up" in bench("small", "--url", nowhere, code=3)
    assert "nothing to compare with" in bench("compare", "--native", service.address, code=2)
    said = bench("compare", "--native", service.address, "--codejudge", nowhere, code=3)
    assert "--codejudge" in said and "/ping" in said


def test_scenarios_are_named_shown_and_drawn_again(service: "Service", tmp_path: Path) -> None:
    assert "math-rollout" in bench("list")
    shown = bench("show", "small")
    mine, prefix = tmp_path / "mine.toml", tmp_path / "mine"
    mine.write_text(shown)
    bench(str(mine), "--url", service.address, "--in-flight", "2", *SHORT, "--output", str(prefix))
    first = _page(prefix)
    again = tmp_path / "again.html"
    bench("report", f"{prefix}.json", "--output", str(again))
    ids = re.compile(r"(id=|href=|url\()[^\s>]*")
    assert ids.sub("", again.read_text()) == ids.sub("", first)


def test_help_teaches_by_example() -> None:
    said = " ".join(bench("--help").split())
    for example in ("rollyard bench burst-45k --null", "rollyard bench compare --sandboxfusion"):
        assert example in said
    any_help: Any = bench("compare", "--help")
    assert "A, B, A, B" in any_help
