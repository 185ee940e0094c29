"""The simulation against what must hold of any queue, and of those that have formulas."""

import math
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard_loadtest.plan_model import erlang_c, mean_wait_s, wait_quantile_s
from rollyard_loadtest.plan_validate import groups_for_each_core
from rollyard_loadtest.simulation import Simulation
from rollyard_loadtest.simulation_events import Calendar, Cores
from rollyard_loadtest.simulation_model import (
    FIRST_LOOK_S,
    HOLD_S,
    MAX_HOLDS,
    PLACES_PER_CORE,
    PREFETCH_PER_CORE,
    STOPPED_AFTER,
    Arrivals,
    Cluster,
    Exponential,
    Measured,
    RunClass,
    Simulated,
    quantile,
)
from rollyard_sandbox import clock, gate, worker

costs_s = st.sampled_from([0.0, 0.0002, 0.003])
clusters = st.builds(
    Cluster,
    workers=st.integers(1, 3), cores=st.integers(1, 4), slots=st.none() | st.integers(1, 9),
    gateways=st.integers(1, 2), shards=st.integers(1, 2), gateway_s=costs_s, shard_s=costs_s,
    worker_s=costs_s, client_s=costs_s, hop_s=costs_s, one_machine=st.booleans(),
    background=st.sampled_from([0.0, 0.7, 3.0]),
)  # fmt: skip
classes = st.lists(
    st.builds(
        RunClass,
        name=st.just("any"), share=st.floats(0.1, 1),
        cpu=st.builds(Measured, st.tuples(st.floats(0.0005, 0.1), st.floats(0.0005, 0.8))),
        sleep=st.builds(Measured, st.tuples(st.sampled_from([0.0, 0.05, 0.4]))),
        stopped=st.booleans(),
    ),
    min_size=1, max_size=3,
)  # fmt: skip
loads = st.one_of(
    st.builds(Arrivals, kind=st.just("burst"), runs=st.integers(1, 150)),
    st.builds(
        Arrivals, kind=st.just("closed"), runs=st.integers(1, 40), until_s=st.just(2.0),
        warmup_s=st.sampled_from([0.0, 0.5]),
    ),
    st.builds(
        Arrivals, kind=st.just("poisson"), rate_per_s=st.floats(1, 120), until_s=st.just(2.0),
        warmup_s=st.sampled_from([0.0, 0.5]),
    ),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(clusters, classes, loads, st.integers(0, 9))
def test_every_run_is_answered_once_and_none_faster_than_it_computes(
    cluster: Cluster, mix: list[RunClass], load: Arrivals, seed: int
) -> None:
    done = Simulation(cluster, mix, load, seed=f"{seed}").run()
    assert done.answered == done.arrived
    if load.kind == "burst":
        assert done.arrived == len(done.latencies_s) == load.runs
    fastest_s = min(value for one in mix for value in values_of(one))
    assert all(latency_s >= fastest_s - 1e-9 for latency_s in done.latencies_s)
    assert len(done.finished_s) <= len(done.latencies_s)
    assert 0 <= done.utilisation <= 1 + 1e-9


@settings(max_examples=30, deadline=None)
@given(clusters, classes, loads, st.integers(0, 9))
def test_a_seed_gives_the_same_again(
    cluster: Cluster, mix: list[RunClass], load: Arrivals, seed: int
) -> None:
    first = Simulation(cluster, mix, load, seed=f"{seed}").run()
    assert first == Simulation(cluster, mix, load, seed=f"{seed}").run()


@settings(max_examples=30, deadline=None)
@given(clusters, classes, st.integers(1, 150), st.integers(0, 9))
def test_little_s_law_holds_exactly_from_empty_to_empty(
    cluster: Cluster, mix: list[RunClass], runs: int, seed: int
) -> None:
    """L = λW over a window that begins and ends empty (Little 1961), whatever is in between."""
    load = Arrivals(kind="burst", runs=runs)
    done = Simulation(cluster, mix, load, seed=f"{seed}").run()
    assert done.mean_in_system * done.window_s == pytest.approx(sum(done.latencies_s))


def values_of(kind: RunClass) -> tuple[float, ...]:
    assert isinstance(kind.cpu, Measured)
    return kind.cpu.values_s


def plain(servers: int) -> Cluster:
    """k servers, first come first served: no costs but the programs', a core for each place."""
    return Cluster(
        cores=servers, places_per_core=1, hold_s=math.inf, max_holds=math.inf, slots=1 << 20,
        prefetch_per_core=1 << 20,
    )  # fmt: skip


def long_run(
    cluster: Cluster, service: Exponential | Measured, *, load: float, runs: int = 20_000
) -> Simulated:
    rate = load * cluster.cores / service.mean_s
    until_s = runs / rate
    arrivals = Arrivals(kind="poisson", rate_per_s=rate, until_s=until_s, warmup_s=until_s / 10)
    kind = RunClass(name="any", share=1, cpu=service)
    return Simulation(cluster, [kind], arrivals, seed="long").run()


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (2, 0.7), (4, 0.7), (8, 0.8)])
def test_memoryless_service_agrees_with_m_m_k(servers: int, load: float) -> None:
    service_s = 0.02
    done = long_run(plain(servers), Exponential(service_s), load=load)
    rate = load * servers / service_s
    expected_s = service_s + mean_wait_s(servers, rate, service_s, 1.0)
    assert mean(done.latencies_s) == pytest.approx(expected_s, rel=0.06)
    assert done.runs_per_s == pytest.approx(rate, rel=0.03)
    assert done.mean_in_system == pytest.approx(rate * expected_s, rel=0.08)
    assert done.utilisation == pytest.approx(load, rel=0.04)


def test_constant_service_agrees_with_m_d_1() -> None:
    done = long_run(plain(1), Measured((0.02,)), load=0.7)
    waited_s = mean(done.latencies_s) - 0.02
    assert waited_s == pytest.approx(mean_wait_s(1, 35, 0.02, 0.0), rel=0.08)


def test_shared_cores_do_not_care_for_the_distribution() -> None:
    """M/G/1 processor sharing: S / (1 - load) for any distribution of the same mean."""
    everybody = Cluster(cores=1, places_per_core=1 << 20, slots=1 << 20, prefetch_per_core=1 << 20)
    for service in (Measured((0.001, 0.039)), Exponential(0.02), Measured((0.02,))):
        done = long_run(everybody, service, load=0.6)
        assert mean(done.latencies_s) == pytest.approx(0.02 / 0.4, rel=0.08)


def test_waits_have_the_quantiles_of_m_m_k() -> None:
    done = long_run(plain(2), Exponential(0.02), load=0.8, runs=30_000)
    # Sojourn of M/M/2: wait and service; its 99th percentile lies between both bounds.
    wait_s = wait_quantile_s(2, 80, 0.02, 1.0, 0.99)
    assert wait_s < quantile(done.latencies_s, 0.99) < wait_s + 0.02 * math.log(100)


@pytest.mark.parametrize(
    ("servers", "offered", "probability"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.409181)]
)
def test_erlang_c_has_the_tables_values(servers: int, offered: float, probability: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(probability, rel=1e-4)


def test_sleepers_hold_no_core_and_fill_all_slots() -> None:
    asleep = RunClass(name="sleep", share=1, cpu=Measured((0.001,)), sleep=Measured((1.0,)))
    done = Simulation(Cluster(cores=2, slots=64), [asleep], Arrivals(kind="burst", runs=64)).run()
    assert max(done.latencies_s) < 2.0  # 64 seconds of sleep, beside each other
    assert done.utilisation < 0.1


@pytest.mark.parametrize(
    ("background", "programs", "ended_s"),
    [
        (0.0, 1, 1.0),
        (0.0, 4, 2.0),
        (3.0, 1, 1.25),  # a weight of two beside three: 2 cores * 2/5
        (3.0, 2, 2.5),  # the same for both
        (1.0, 1, 1.0),  # a core for each
        (1.0, 2, 1.5),  # 2 cores * 2/3, and the background has the rest
        (0.5, 4, 2.5),  # 2 cores * 2/2.5
    ],
)
def test_programs_have_their_weight_against_others(
    background: float, programs: int, ended_s: float
) -> None:
    calendar = Calendar()
    cores = Cores(calendar, 2, background=background)
    ended: list[float] = []
    for _ in range(programs):
        cores.program(1.0, lambda: ended.append(calendar.now_s))
    calendar.run(until_s=math.inf)
    assert ended == [pytest.approx(ended_s)] * programs


@pytest.mark.parametrize(("cores", "background"), [(2, 0.5), (2, 3.0), (8, 4.0)])
def test_what_others_use_says_how_many_they_are(cores: int, background: float) -> None:
    calendar = Calendar()
    machine = Cores(calendar, cores, background=background)
    for _ in range(2 * cores):
        machine.program(1.0, lambda: None)
    calendar.run(until_s=math.inf)
    ours = machine.busy_s / calendar.now_s
    foreign = cores - ours
    assert groups_for_each_core(cores, ours) * foreign == pytest.approx(background)


def test_our_processes_and_programs_share_what_there_is() -> None:
    calendar = Calendar()
    cores = Cores(calendar, 2)
    processes: list[float] = []
    programs: list[float] = []
    for _ in range(2):
        cores.process(0.5, lambda: processes.append(calendar.now_s))
        cores.program(1.0, lambda: programs.append(calendar.now_s))
    calendar.run(until_s=math.inf)
    # A core for two processes of half a second each, then both cores for the programs.
    assert processes == [pytest.approx(1.0)] * 2
    assert programs == [pytest.approx(1.5)] * 2


def test_a_trace_is_what_comes_and_when() -> None:
    short, long = (
        RunClass(name=str(cpu_s), share=1, cpu=Measured((cpu_s,))) for cpu_s in (0.25, 1.0)
    )
    other = RunClass(name="other", share=1, cpu=Measured((7.0,)))
    trace = ((0.5, long), (2.0, short), (2.0, short))
    load = Arrivals(kind="poisson", rate_per_s=99, trace=trace)
    done = Simulation(Cluster(cores=1), [other], load).run()
    assert done.latencies_s == [pytest.approx(one) for one in (1.0, 0.5, 0.5)]
    load = Arrivals(kind="burst", runs=4, trace=trace)
    done = Simulation(Cluster(cores=4), [other], load).run()
    assert sorted(done.latencies_s) == [pytest.approx(one) for one in (0.25, 0.25, 1.0, 7.0)]


def test_a_program_that_is_starved_is_stopped_at_three_times_its_limit() -> None:
    endless = RunClass(name="endless", share=1, cpu=Measured((1.0,)), stopped=True)
    for runs, expected_s in ((1, 1.0), (2, 2.0), (8, 3.0)):
        load = Arrivals(kind="burst", runs=runs)
        done = Simulation(Cluster(cores=1, places_per_core=8), [endless], load).run()
        assert done.latencies_s[0] == pytest.approx(expected_s)
        assert done.finished_s == []


def test_the_gate_and_the_worker_are_those_of_the_sandbox() -> None:
    assert (PLACES_PER_CORE, FIRST_LOOK_S, HOLD_S, MAX_HOLDS) == (
        gate.PLACES_FOR_EACH_CORE, gate.FIRST_LOOK_S, gate.HOLD_S, gate.MAX_HOLDS,
    )  # fmt: skip
    assert STOPPED_AFTER == 1 + clock._GRACE  # pyright: ignore[reportPrivateUsage]
    assert PREFETCH_PER_CORE == worker._PREFETCH_FOR_EACH_CORE  # pyright: ignore[reportPrivateUsage]
