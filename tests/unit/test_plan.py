"""Plans from costs that are known: what they answer, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollyard_loadtest import plan_command, scenario
from rollyard_loadtest.costs import Costs, CostsError, KindCost, MemoryCost, PartCost, load_costs
from rollyard_loadtest.figures import Machine
from rollyard_loadtest.plan import ImpossibleWish, Plan, Planner, Wish
from rollyard_loadtest.plan_validate import Figure, as_json, table

MIB = 1 << 20


def kind(name: str, share: float, *cpu_ms: float, **fields: Any) -> KindCost:
    given: dict[str, Any] = {"stopped": False, "sleep_ms": [0.0], "template": "bare"}
    return KindCost(
        name=name, share=share, cpu_ms=list(cpu_ms), own_ms=list(cpu_ms),
        request_bytes=400, result_bytes=300,
        **(given | fields),
    )  # fmt: skip


def costs(*kinds: KindCost, worker_ms: float = 0.5, name: str = "small") -> Costs:
    def part(gateway_ms: float, valkey_ms: float) -> PartCost:
        return PartCost(
            gateway_ms=gateway_ms, valkey_ms=valkey_ms, worker_ms=worker_ms, client_ms=0.5
        )

    return Costs(
        scenario=name,
        machine=Machine(
            cores=2, cpu="test", memory_bytes=8 << 30, kernel="6", python="3.12", load_average=0
        ),
        kinds=list(kinds),
        mixed=part(0.3, 0.2),
        crowding=1.0,
        single=part(0.6, 0.4),
        batched=part(0.02, 0.02),
        latency_ms=3.0,
        memory=MemoryCost(
            gateway_bytes=50 * MIB, worker_bytes=40 * MIB, templates_bytes=160 * MIB,
            slot_bytes={"bare": 2 * MIB, "science": 3 * MIB}, waiting_valkey_bytes=1000,
            waiting_gateway_bytes=1000,
        ),
    )  # fmt: skip


def planned(known: Costs, **wish: Any) -> Plan:
    return Planner(known, say=lambda _: None, simulated_runs=500).plan(Wish(**wish))


SMALL = costs(kind("print", 1.0, 4.0, 5.0, 6.0))


def test_a_burst_needs_at_least_its_work_s_cores() -> None:
    made = planned(SMALL, in_flight=4000, p99_s=1.0)
    work_core_s = 4000 * (5.0 + 0.5) / 1e3
    assert work_core_s <= made.worker_cores <= 2 * work_core_s
    assert made.p99_s <= 1.0
    assert made.worker_cores == made.workers * made.cores_per_worker
    assert made.slots_per_worker == 16 * made.cores_per_worker
    assert made.memory_bytes["workers"] > made.workers * (200 * MIB + made.slots_per_worker * MIB)
    assert json.loads(json.dumps(made.figures()))["worker_cores"] == made.worker_cores


def test_more_calls_and_shorter_times_take_more_cores() -> None:
    base = planned(SMALL, in_flight=3000, p99_s=1.0).worker_cores
    assert planned(SMALL, in_flight=6000, p99_s=1.0).worker_cores > 1.6 * base
    assert planned(SMALL, in_flight=3000, p99_s=2.0).worker_cores < 0.75 * base
    assert planned(SMALL, in_flight=3000, p99_s=1.0, think_s=30.0).worker_cores < 0.3 * base


def test_fewer_cores_are_slower() -> None:
    curve = planned(SMALL, in_flight=4000, p99_s=1.0).curve
    assert len(curve) >= 5
    cores, p99s = [one for one, _ in curve], [one for _, one in curve]
    assert cores == sorted(cores)
    assert p99s[0] > p99s[-1]
    assert p99s[0] > 1.0 > p99s[-1]


def test_requests_of_one_run_take_more_gateways() -> None:
    many = planned(SMALL, in_flight=20_000, p99_s=1.0)
    alone = planned(SMALL, in_flight=20_000, p99_s=1.0, batch=1)
    assert alone.gateways > 5 * many.gateways
    assert alone.shards > many.shards


def test_a_worker_has_no_more_cores_than_its_thread_keeps_busy() -> None:
    made = planned(SMALL, in_flight=500, p99_s=1.0)
    assert made.cores_per_worker == 5  # 5 ms a run, of which 0.5 are the thread's, half busy
    wide = planned(SMALL, in_flight=500, p99_s=1.0, cores_per_worker=16)
    assert any("one thread is the limit" in note for note in wide.notes)


def test_a_wish_below_the_programs_own_time_is_refused() -> None:
    slow = costs(kind("print", 0.9, 5.0), kind("sympy", 0.1, 400.0))
    with pytest.raises(ImpossibleWish, match=r"without any waiting.*'sympy'"):
        planned(slow, in_flight=100, p99_s=0.3)
    assert planned(slow, in_flight=100, p99_s=1.0).floor_s == pytest.approx(0.403, abs=0.01)


def test_stopped_programs_take_cores_but_have_no_latency() -> None:
    endless = kind("endless", 0.02, 1000.0, 2000.0, stopped=True)
    mixed = costs(kind("print", 0.98, 5.0), endless)
    made = planned(mixed, in_flight=2000, p99_s=1.0)
    assert any("stopped at their own time limit" in note for note in made.notes)
    assert made.worker_cores > planned(SMALL, in_flight=2000, p99_s=1.0).worker_cores
    with pytest.raises(ImpossibleWish, match="--of finished"):
        planned(mixed, in_flight=2000, p99_s=1.0, of="all")
    with pytest.raises(ImpossibleWish, match="--of all"):
        planned(costs(endless), in_flight=10, p99_s=5.0)


def test_sleepers_take_slots_and_hardly_a_core() -> None:
    asleep = costs(kind("sleep", 1.0, 5.0, sleep_ms=[800.0]))
    made = planned(asleep, in_flight=400, p99_s=2.0)
    assert made.floor_s > 0.8
    assert made.worker_cores < 20


def test_the_same_costs_and_seed_give_the_same_plan() -> None:
    assert planned(SMALL, in_flight=1000, p99_s=0.7) == planned(SMALL, in_flight=1000, p99_s=0.7)


def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(SMALL.model_dump_json())
    return path


def run_plan(*words: str) -> int:
    code = plan_command.app(words, exit_on_error=False, result_action="return_value")
    assert isinstance(code, int)
    return code


def test_the_command_plans_from_a_costs_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_file(tmp_path)
    common = ("--in-flight", "300", "--mix", "small", "--costs", str(path))
    assert run_plan(*common, "--output", str(tmp_path / "plan")) == 0
    said = capsys.readouterr()
    assert "| gateways | 1 | 1 |" in said.out
    assert "simulating" in said.err
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert run_plan(*common, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--p99", "0.001"), "cannot be had with any number of cores"),
        (("--mix", "smal"), "Did you mean 'small'"),
        (("--mix", "math-rollout"), "measured for 'small'"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_file(tmp_path)
    mix = () if "--mix" in words else ("--mix", "small")
    assert run_plan("--costs", str(path), *mix, *words) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_costs_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("{}")
    with pytest.raises(CostsError, match="not a costs file"):
        load_costs(path, scenario.load("small"))


def test_figures_agree_within_a_fifth() -> None:
    near = Figure("64 in flight", "p99", 1.0, 1.19, 0.0)
    far = Figure("64 in flight", "p50", 1.0, 0.79, 0.3)
    assert near.agrees and not far.agrees
    text = table([near, far])
    assert "+19%" in text and "beyond 20%" in text and "1 of 2 figures agree" in text
    assert [one["agrees"] for one in as_json([near, far])] == [True, False]
