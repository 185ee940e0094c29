"""Concurrent calls travel together, and none depends on another."""

import asyncio
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollyard import AsyncClient, Client, RunRequest, RunResult, TransportError
from rollyard._config import TransportKind

from .peer import Gate, Peer, answer, hold, hold_body, refuse


async def test_concurrent_calls_share_requests(peer: Peer, transport: TransportKind) -> None:
    async with AsyncClient(peer.url, transport=transport) as client:
        results = await asyncio.gather(*(client.run(f"p{i}") for i in range(130)))
    assert [result.stdout for result in results] == [f"p{i}" for i in range(130)]
    assert [len(seen.runs) for seen in peer.batches] == [64, 64, 2]
    ids = [run_id for seen in peer.batches for run_id in seen.ids]
    assert len(set(ids)) == 130
    assert all(re.fullmatch("[0-9a-f]{32}", run_id) for run_id in ids)
    assert {seen.headers["accept"] for seen in peer.batches} == {"application/x-ndjson"}


async def test_window_and_size_are_settings(peer: Peer) -> None:
    async with AsyncClient(peer.url, batch_max_runs=3, batch_max_delay_s=0) as client:
        await asyncio.gather(*(client.run(f"p{i}") for i in range(8)))
        await client.run("alone")
    assert sorted(len(seen.runs) for seen in peer.batches) == [1, 2, 3, 3]


async def test_large_runs_do_not_share_a_request(peer: Peer, transport: TransportKind) -> None:
    big = "#" * (3 * 1024 * 1024)
    async with AsyncClient(peer.url, transport=transport) as client:
        await asyncio.gather(*(client.run(f"{i}{big}") for i in range(3)), client.run("small"))
    assert sorted(len(seen.runs) for seen in peer.batches) == [1, 1, 2]


async def test_each_call_returns_as_soon_as_its_line_comes(
    peer: Peer, transport: TransportKind
) -> None:
    gate = Gate()
    peer.always = hold({"slow": gate})
    async with AsyncClient(peer.url, transport=transport) as client:
        slow = asyncio.ensure_future(client.run("slow"))
        quick = await client.run("quick")
        assert quick.stdout == "quick"
        assert len(peer.batches) == 1
        assert not slow.done()
        gate.open()
        assert (await slow).stdout == "slow"


async def test_connections_are_bounded_and_batches_grow_instead(
    peer: Peer, transport: TransportKind
) -> None:
    gate = Gate()
    peer.scripts.extend([hold({"a": gate}), hold({"b": gate})])
    async with AsyncClient(peer.url, max_connections=2, transport=transport) as client:
        first = asyncio.ensure_future(client.run("a"))
        await peer.until(lambda: len(peer.requests) == 1)
        second = asyncio.ensure_future(client.run("b"))
        await peer.until(lambda: len(peer.requests) == 2)
        waiting: list[asyncio.Future[RunResult]] = []
        for i in range(20):  # one window after the other, none of which can be sent
            waiting.append(asyncio.ensure_future(client.run(f"w{i}")))
            await asyncio.sleep(0.003)
        assert len(peer.requests) == 2
        gate.open()
        await asyncio.gather(first, second, *waiting)
    assert [len(seen.runs) for seen in peer.batches] == [1, 1, 20]


async def test_cancelled_call_leaves_its_neighbours_alone(
    peer: Peer, transport: TransportKind
) -> None:
    gate = Gate()
    peer.always = hold({"neighbour": gate, "doomed": gate})
    async with AsyncClient(peer.url, transport=transport) as client:
        neighbour = asyncio.ensure_future(client.run("neighbour"))
        doomed = asyncio.ensure_future(client.run("doomed"))
        await peer.until(lambda: len(peer.requests) == 1)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await peer.until(lambda: len(peer.deletes) == 1)
        gate.open()
        assert (await neighbour).stdout == "neighbour"
    assert len(peer.batches) == 1
    assert peer.deletes == [peer.batches[0].ids[1]]


async def test_cancelled_lone_call_hangs_up_and_cancels_its_run(
    peer: Peer, transport: TransportKind
) -> None:
    gate = Gate()
    peer.always = hold({"doomed": gate})
    async with AsyncClient(peer.url, transport=transport) as client:
        doomed = asyncio.ensure_future(client.run("doomed"))
        await peer.until(lambda: len(peer.requests) == 1)
        doomed.cancel()
        await peer.until(lambda: peer.requests[0].gone.is_set() and len(peer.deletes) == 1)
        gate.open()
    assert peer.deletes == peer.batches[0].ids


async def test_close_after_a_cancel_still_says_so(peer: Peer) -> None:
    peer.always = hold({"doomed": Gate(), "neighbour": Gate()})
    client = AsyncClient(peer.url)
    doomed = asyncio.ensure_future(client.run("doomed"))
    neighbour = asyncio.ensure_future(client.run("neighbour"))
    await peer.until(lambda: len(peer.requests) == 1)
    doomed.cancel()
    await asyncio.wait([doomed])
    await client.aclose()
    assert peer.deletes == [peer.batches[0].ids[0]]
    with pytest.raises(TransportError):
        await neighbour


async def test_cancel_that_fails_or_hangs_disturbs_nobody(peer: Peer) -> None:
    gate = Gate()
    peer.always = hold({"doomed": Gate(), "neighbour": gate})
    peer.short_scripts.extend([refuse(500), hold_body(Gate())])
    async with AsyncClient(peer.url) as client:
        doomed = [asyncio.ensure_future(client.run("doomed")) for _ in range(2)]
        neighbour = asyncio.ensure_future(client.run("neighbour"))
        await peer.until(lambda: len(peer.requests) == 1)
        for task in doomed:
            task.cancel()
        await peer.until(lambda: len(peer.deletes) == 2)
        gate.open()
        assert (await neighbour).ok


async def test_request_and_endless_patience(peer: Peer) -> None:
    async with AsyncClient(peer.url, timeout_s=30, job="ours") as client:
        assert (await client.submit(RunRequest(code="p", run_id="mine"))).run_id == "mine"
        assert (await client.run("p", timeout_s=math.inf)).ok
    with Client(peer.url, job="ours") as client:
        assert client.submit(RunRequest(code="p")).ok
    assert {run["job"] for seen in peer.batches for run in seen.runs} == {"ours"}


async def test_cancelled_group_hangs_up_once(peer: Peer) -> None:
    gate = Gate()
    peer.always = hold({f"p{i}": gate for i in range(20)})
    async with AsyncClient(peer.url) as client:
        group = [asyncio.ensure_future(client.run(f"p{i}")) for i in range(20)]
        await peer.until(lambda: len(peer.requests) == 1)
        for task in group:
            task.cancel()
        await peer.until(lambda: peer.requests[0].gone.is_set())
        gate.open()
        assert (await client.run("after")).stdout == "after"
    assert peer.deletes == []


async def test_call_cancelled_within_its_window_is_never_sent(peer: Peer) -> None:
    async with AsyncClient(peer.url, batch_max_delay_s=0.05) as client:
        doomed = asyncio.ensure_future(client.run("doomed"))
        await asyncio.sleep(0)
        doomed.cancel()
        await client.run("other")
    assert [run["code"] for seen in peer.batches for run in seen.runs] == ["other"]
    assert peer.deletes == []


async def test_same_id_twice_at_once_answers_both(peer: Peer) -> None:
    async with AsyncClient(peer.url) as client:
        results = await asyncio.gather(*(client.run("p", run_id="mine-1") for _ in range(2)))
    assert [result.run_id for result in results] == ["mine-1", "mine-1"]
    assert [seen.ids for seen in peer.batches] == [["mine-1"], ["mine-1"]]


async def test_own_id_that_another_call_waits_for_is_not_cancelled(peer: Peer) -> None:
    gate = Gate()
    peer.always = hold({"p": gate})
    async with AsyncClient(peer.url) as client:
        stays, goes = (asyncio.ensure_future(client.run("p", run_id="mine-1")) for _ in range(2))
        await peer.until(lambda: len(peer.requests) == 2)
        goes.cancel()
        await peer.until(lambda: peer.requests[1].gone.is_set() or peer.requests[0].gone.is_set())
        gate.open()
        assert (await stays).ok
    assert peer.deletes == []


def test_threads_share_requests(peer: Peer, transport: TransportKind) -> None:
    gate = Gate()
    peer.scripts.append(hold({"first": gate}))
    peer.always = answer
    with (
        Client(peer.url, max_connections=1, transport=transport) as client,
        ThreadPoolExecutor(33) as pool,
    ):
        first = pool.submit(client.run, "first")
        peer.wait_until(lambda: len(peer.requests) == 1)
        results = pool.map(client.run, [f"p{i}" for i in range(32)])
        gate.open()
        assert first.result().stdout == "first"
        assert [result.stdout for result in results] == [f"p{i}" for i in range(32)]
    assert len(peer.batches) < 20
