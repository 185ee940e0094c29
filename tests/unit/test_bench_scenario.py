"""Scenarios: those of the package are sound, and a malformed one is told what is wrong."""

import contextlib
import gzip
import io
import json
import math
import re
from itertools import islice
from pathlib import Path

import pytest

from rollyard import Limits
from rollyard_loadtest import scenario as scenarios
from rollyard_loadtest.load import Burst, Closed, Poisson
from rollyard_loadtest.scenario import ScenarioError, load, names, parse
from rollyard_loadtest.workload import Work

HEAD = 'schema = 1\nname = "mine"\ntitle = "Mine"\n'
CLOSED = '[load]\narrivals = "closed"\nin_flight = 4\n'
CODE = '[[programs]]\nkind = "code"\ncode = "1"\n'
PRINT = '[[programs]]\nkind = "print"\n'
PROMISED = {
    "math-rollout", "small", "numpy", "sympy", "burst-45k", "hostile-mix", "sleepers", "overload",
    "in-flight-sweep", "humaneval",
}  # fmt: skip


def _works(name: str, count: int = 300) -> list[Work]:
    return list(islice(load(name).works("seed"), count))


def test_the_package_has_what_it_promises() -> None:
    assert set(names()) == PROMISED


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_a_scenario_of_the_package_is_sound(name: str) -> None:
    scenario = load(name)
    assert scenario.name == name
    assert scenario.stages()
    assert math.isclose(sum(scenario.shares().values()), 1.0)
    for work in _works(name, 50):
        assert work.code
        assert work.nominal_s >= 0
        Limits.model_validate(work.limits)


@pytest.mark.parametrize("name", ["math-rollout", "hostile-mix", "humaneval"])
def test_the_same_seed_draws_the_same_programs(name: str) -> None:
    assert _works(name) == _works(name)
    other = list(islice(load(name).works("another"), 300))
    assert other != _works(name)


def test_the_mix_is_that_of_its_weights() -> None:
    kinds = [work.kind for work in _works("math-rollout", 20_000)]
    for name, share in load("math-rollout").shares().items():
        assert abs(kinds.count(name) / len(kinds) - share) < 0.02


def test_loops_and_prints_expect_what_they_print() -> None:
    plain = [w for w in _works("math-rollout") if w.kind == "loop"] + _works("small", 20)
    for work in plain:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(work.code, "work", "exec"), {})
        assert printed.getvalue() == work.stdout


def test_loops_are_as_long_as_the_scenario_says() -> None:
    times = [work.nominal_s for work in _works("math-rollout") if work.kind == "loop"]
    assert 0.001 <= min(times) <= 0.003
    assert 0.017 <= max(times) <= 0.020


def test_a_sweep_has_a_stage_for_each_value() -> None:
    stages = load("in-flight-sweep").stages()
    sizes = [
        (s.load.in_flight, s.load.runs_per_request) for s in stages if isinstance(s.load, Closed)
    ]
    assert sizes[0] == (1, 1)
    assert (64, 64) in sizes
    assert sizes[-1] == (45_000, 64)


def test_multiples_of_capacity_become_rates_once_it_is_known() -> None:
    capacity, half, *_, treble = load("overload").stages()
    assert isinstance(capacity.load, Closed)
    for stage, rate in ((half, 50.0), (treble, 300.0)):
        settled = stage.at_capacity(100.0).load
        assert isinstance(settled, Poisson)
        assert settled.rate_per_s == rate


def test_a_burst_is_of_its_rollouts() -> None:
    [stage] = load("burst-45k").stages()
    assert isinstance(stage.load, Burst)
    assert stage.load.rollouts == 45_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "schema = 1"),
        ("schema = 2\n", "schema = 1"),
        ("schema =", "not TOML"),
        (HEAD + PRINT, "load: Field required"),
        (HEAD + CLOSED, "programs: Field required"),
        (HEAD + '[load]\narrivals = "posson"\n' + PRINT, "did you mean 'poisson'?"),
        (HEAD + "[load]\nin_flight = 4\n" + PRINT, "must say 'arrivals': one of closed, poisson"),
        (HEAD + CLOSED + "inflight = 3\n" + PRINT, "no such field; did you mean 'in_flight'?"),
        (HEAD + CLOSED + '[[programs]]\nkind = "lop"\n', "did you mean 'loop'?"),
        (HEAD + CLOSED + "[[programs]]\nweight = 1\n", "must say 'kind': one of print, loop"),
        (HEAD + CLOSED + PRINT + "weight = 0\n", "print.weight: Input should be greater"),
        (HEAD + CLOSED + '[[programs]]\nkind = "loop"\nms = 3\n', "programs.0.loop.ms"),
        (HEAD + CLOSED + CODE + "limits = {time = 3}\n", "limits.time"),
        (HEAD + CLOSED + PRINT + '[sweep]\nparameter = "rate_per_s"\nvalues = [1]\n', "'poisson'"),
        (HEAD + CLOSED + '[[programs]]\nkind = "jsonl"\npath = "absent.jsonl"\n', "absent.jsonl"),
    ],
)  # fmt: skip
def test_a_malformed_scenario_is_told_where_and_what(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse(text, at=tmp_path / "mine.toml")
    assert said in str(caught.value)
    assert "mine.toml" in str(caught.value) or "absent.jsonl" in str(caught.value)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match=r"Did you mean 'math-rollout'\?.*burst-45k"):
        load("math-rolout")
    with pytest.raises(ScenarioError, match="no such file"):
        load("mine.toml")


def test_a_number_in_a_program_is_its_own(tmp_path: Path) -> None:
    program = '[[programs]]\nkind = "code"\ncode = "print({{n}})"\nstdout = "{{n}}\\n"\n'
    works = parse(HEAD + CLOSED + program, at=tmp_path / "mine.toml").works("1", first=7)
    assert [(w.code, w.stdout) for w in islice(works, 2)] == [
        ("print(7)", "7\n"), ("print(8)", "8\n"),
    ]  # fmt: skip


def test_a_file_of_programs_is_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [{"code": "print(1)", "stdout": "1\n", "kind": "one"},
             {"code": "1/0", "outcome": "error", "limits": {"timeout_s": 2}}]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    found = set[tuple[str, str, str | None]]()
    for work in islice(load(str(path)).works("1"), 50):
        found.add((work.kind, work.outcome, work.stdout))
    assert found == {("one", "ok", "1\n"), ("listed", "error", None)}


def test_problems_of_humaneval_become_programs(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl.gz"
    problem = {"prompt": "def f():\n", "canonical_solution": "    return 1\n", "entry_point": "f",
               "test": "def check(candidate):\n    assert candidate() == 1\n"}  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps(problem).encode()))
    work = next(load(str(path)).works("1"))
    exec(compile(work.code, "work", "exec"), {})
    assert work.outcome == "ok"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"stdout": "1"}', "line 2: code: Field required"),
        ('{"code": "1", "outcome": "fine"}', "line 2: outcome"),
        ('{"code": "1", "limits": {"timeout_s": -1}}', "line 2: timeout_s"),
        ('{"canonical_solution": "1"}', "line 2: a HumanEval problem without"),
    ],
)
def test_a_malformed_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"code": "1"}}\n{line}\n')
    with pytest.raises(ScenarioError, match=said):
        load(str(path))


def test_an_empty_file_of_programs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n")
    with pytest.raises(ScenarioError, match="no program in it"):
        load(str(path))


def test_the_documented_scenario_is_sound(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs/bench.md"
    [text] = re.findall(r"```toml\n(.*?)```", guide.read_text(), re.DOTALL)
    (tmp_path / "programs.jsonl").write_text('{"code": "1"}\n')
    scenario = parse(text, at=tmp_path / "mine.toml")
    assert set(scenario.shares()) == {"loop", "figure", "jsonl"}
    assert len(scenario.stages()) == 3


def test_the_packages_files_are_where_the_loader_looks() -> None:
    assert scenarios.path_of("small").is_file()
    assert scenarios.path_of("humaneval").with_name("HumanEval.jsonl.gz").is_file()
