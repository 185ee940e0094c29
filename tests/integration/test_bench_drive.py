"""The load generator against servers that are slow, busy, broken or lying."""

import asyncio
import time
from itertools import islice
from pathlib import Path
from typing import Any

from aiohttp import web
from scripted_batches import Runs, Script, Scripted, honest, lines, result, serving

from rollyard_loadtest.arrivals import poisson
from rollyard_loadtest.drive import Driver, window
from rollyard_loadtest.load import Burst, Closed, Load, Poisson
from rollyard_loadtest.tally import Tally
from rollyard_loadtest.target_native import HttpTarget
from rollyard_loadtest.workload import Print, works

KINDS = [Print(kind="print")]


def _closed(**fields: Any) -> Closed:
    defaults = {"in_flight": 4, "duration_s": 0.3, "warmup_s": 0, "drain_s": 5}
    return Closed.model_validate({"arrivals": "closed", **defaults, **fields})


def _burst(**fields: Any) -> Burst:
    defaults = {"rollouts": 10, "duration_s": 30, "drain_s": 5, "warmup_runs": 0, "think_s": [0, 0]}
    return Burst.model_validate({"arrivals": "burst", **defaults, **fields})


async def _drive(server: Scripted, load: Load, seed: str = "1") -> Tally:
    tally = Tally(window(load))
    target = HttpTarget(server.url, load)
    driver = Driver(target, load, list(islice(works(KINDS, seed), 500)), tally, seed=seed)
    await target.open()
    try:
        await driver.warm()
        await driver.run(time.monotonic())
    finally:
        await target.close()
    assert driver.in_flight == 0
    return tally


def _at_first(answer: Script, count: int = 1) -> Script:
    """``answer`` the first requests, all others honestly."""

    async def script(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        first = len(server.requests) <= count
        return await (answer if first else honest)(server, runs, request)

    return script


async def _busy(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "overloaded"}, status=429, headers={"retry-after": "0"})


async def _hang_up(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_a_closed_loop_holds_its_number_in_flight(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        tally = await _drive(server, _closed(in_flight=10, batch=4))
    sizes = [len(runs) for runs in server.requests]
    assert sizes[:3] == [4, 4, 2]
    assert server.most <= 10
    assert tally.good == tally.due == sum(sizes) > 10
    assert tally.wrong == tally.lost == tally.refused == 0


async def test_a_burst_is_all_there_before_anything_is_answered(tmp_path: Path) -> None:
    everybody = asyncio.Event()

    async def hold(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        if server.now == 50:
            everybody.set()
        await everybody.wait()
        return lines([result(run) for run in runs])

    async with serving(tmp_path, hold) as server:
        tally = await _drive(server, _burst(rollouts=50, batch=4, turns=3))
    assert server.most == 50
    assert tally.good == tally.due == 150
    assert tally.tick.good == 150


async def test_latency_counts_from_when_a_run_was_due(tmp_path: Path) -> None:
    load = Poisson(arrivals="poisson", rate_per_s=100, duration_s=0.5, warmup_s=0, drain_s=5)
    due = list(poisson(100, 0.5, "1-0"))
    everybody = asyncio.Event()

    async def hold(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        if len(server.requests) == len(due):  # so the first waits for the last to be due
            everybody.set()
        await everybody.wait()
        return lines([result(run) for run in runs])

    async with serving(tmp_path, hold) as server:
        tally = await _drive(server, load)
    assert tally.good == len(due)
    longest, middle = tally.latencies.quantile_s(1.0), tally.latencies.quantile_s(0.5)
    assert longest is not None and longest >= (due[-1] - due[0]) * 0.999
    assert middle is not None and middle >= (due[-1] - due[len(due) // 2]) * 0.999


async def test_a_client_that_was_late_charges_it_to_the_run(tmp_path: Path) -> None:
    load = Poisson(arrivals="poisson", rate_per_s=100, duration_s=0.4, warmup_s=0, drain_s=5)

    async def stall(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:  # nothing else of this loop: the generator cannot send
            pass
        return await honest(server, runs, request)

    async with serving(tmp_path, _at_first(stall)) as server:
        tally = await _drive(server, load)
    late = tally.behind.quantile_s(1.0)
    longest = tally.latencies.quantile_s(1.0)
    assert late is not None and longest is not None
    assert longest >= late > 0.1


async def test_warm_up_counts_no_latency_and_no_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        tally = await _drive(server, _closed(warmup_s=0.2, duration_s=0.2))
    assert 0 < tally.good < sum(map(len, server.requests))
    assert len(tally.latencies) == tally.good == tally.due


async def test_a_refusal_is_neither_lost_nor_wrong(tmp_path: Path) -> None:
    async with serving(tmp_path, _at_first(_busy, 3)) as server:
        tally = await _drive(server, _burst(batch=2))
    assert (tally.refused, tally.good, tally.due) == (6, 4, 10)
    assert tally.lost == tally.wrong == tally.retried == 0
    assert len(tally.refusal_latencies) == 6


async def test_a_refused_request_is_sent_again_under_its_ids(tmp_path: Path) -> None:
    async with serving(tmp_path, _at_first(_busy, 5)) as server:
        tally = await _drive(server, _burst(batch=2, retries=3))
    assert tally.good == tally.retried == 10
    assert tally.refused == 0
    ids = [run["run_id"] for runs in server.requests for run in runs]
    assert len(ids) == 20
    assert sorted(set(ids)) == sorted(ids[:10])


async def test_a_broken_connection_loses_the_runs(tmp_path: Path) -> None:
    async with serving(tmp_path, _at_first(_hang_up)) as server:
        tally = await _drive(server, _burst(batch=2))
    assert (tally.lost, tally.good) == (2, 8)
    assert tally.examples[0].startswith("print: lost: ")


async def test_a_server_error_loses_the_runs(tmp_path: Path) -> None:
    async def fail(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="no idea")

    async with serving(tmp_path, _at_first(fail)) as server:
        tally = await _drive(server, _burst(batch=5))
    assert (tally.lost, tally.good) == (5, 5)
    assert "HTTP 500: no idea" in tally.examples[0]


async def test_a_missing_answer_is_lost(tmp_path: Path) -> None:
    async def forget(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        return lines([result(run) for run in runs[:-1]])

    async with serving(tmp_path, forget) as server:
        tally = await _drive(server, _burst(batch=5))
    assert (tally.lost, tally.good) == (2, 8)


async def test_no_answer_at_all_is_lost_when_the_drain_is_over(tmp_path: Path) -> None:
    async def never(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(tmp_path, never) as server:
        tally = await _drive(server, _burst(batch=5, duration_s=0.1, drain_s=0.1))
    assert (tally.lost, tally.good) == (10, 0)
    assert "drain_s" in tally.examples[0]


async def test_wrong_verdicts_are_counted(tmp_path: Path) -> None:
    async def lie(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        first, second, third, *others = [result(run) for run in runs]
        first["stdout"], second["stdout"] = second["stdout"], first["stdout"]  # swapped callers
        third["outcome"] = "timeout"
        return lines([first, second, third, *others])

    async with serving(tmp_path, lie) as server:
        tally = await _drive(server, _burst(batch=10))
    assert (tally.wrong, tally.good, tally.lost) == (3, 7, 0)
    assert "timeout instead of ok" in tally.examples[2]


async def test_an_answer_given_twice_is_wrong(tmp_path: Path) -> None:
    async def repeat(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        results = [result(run) for run in runs]
        return lines([*results, results[0]])

    async with serving(tmp_path, repeat) as server:
        tally = await _drive(server, _burst(batch=10))
    assert (tally.wrong, tally.good) == (1, 10)
    assert "answered twice" in tally.examples[0]


async def test_our_own_faults_are_unjudged(tmp_path: Path) -> None:
    async def break_one(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
        results = [result(run) for run in runs]
        results[0] |= {"outcome": "infra_error", "stdout": "", "message": "worker lost"}
        results[1] |= {"attempt": 2}
        return lines(results)

    async with serving(tmp_path, break_one) as server:
        tally = await _drive(server, _burst(batch=10))
    assert (tally.wrong, tally.good, tally.lost, tally.redelivered) == (0, 9, 0, 1)
    assert tally.outcomes == {"ok": 9, "infra_error": 1}
    assert "worker lost" in tally.examples[0]
