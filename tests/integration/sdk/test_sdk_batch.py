"""Many runs given at once."""

import asyncio
from contextlib import aclosing

import pytest

from rollyard import AsyncClient, BadRequest, Client, DeadlineExceeded, RunRequest, Unavailable
from rollyard._config import TransportKind

from .peer import Gate, Json, Peer, Reply, answer, cut_after, end_after, hold, refuse, refuse_runs


async def test_results_come_as_they_finish(peer: Peer, transport: TransportKind) -> None:
    gates = {"a": Gate(), "b": Gate()}
    peer.always = hold(gates)
    seen: list[str] = []
    async with AsyncClient(peer.url, transport=transport) as client:
        async for result in client.run_batch(["a", "b", "c"]):
            seen.append(result.stdout)
            if seen == ["c"]:
                gates["b"].open()
            elif seen == ["c", "b"]:
                gates["a"].open()
    assert seen == ["c", "b", "a"]


async def test_ordered_results_come_in_the_order_of_requests(peer: Peer) -> None:
    gate = Gate()
    peer.always = hold({"p0": gate})
    programs = [f"p{i}" for i in range(6)]
    async with (
        AsyncClient(peer.url, batch_max_runs=2) as client,
        aclosing(client.run_batch(programs, ordered=True)) as stream,
    ):
        following = asyncio.ensure_future(anext(stream))
        await peer.until(lambda: len(peer.batches) == 3)
        gate.open()
        first = await following
        rest = [result.stdout async for result in stream]
    assert [first.stdout, *rest] == programs


async def test_more_runs_than_may_be_under_way(peer: Peer, transport: TransportKind) -> None:
    programs = [f"p{i}" for i in range(500)]
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    async with AsyncClient(
        peer.url, batch_max_runs=8, max_connections=4, transport=transport
    ) as client:
        results = await client.run_all(programs, progress=progress)
    assert [result.stdout for result in results] == programs
    assert calls == [(i + 1, 500) for i in range(500)]
    assert max(len(seen.runs) for seen in peer.batches) == 8


async def test_items_may_be_text_requests_and_dicts(peer: Peer) -> None:
    items = [
        "text",
        RunRequest(code="request", run_id="mine", job="theirs"),
        RunRequest(code="unnamed job"),
        {"code": "dict", "files": {"a.bin": b"\xff", "b.txt": "x"}, "limits": {"timeout_s": 3}},
    ]
    async with AsyncClient(peer.url, job="ours") as client:
        results = await client.run_all(items)
        assert await client.run_all([]) == []
    assert [result.stdout for result in results] == ["text", "request", "unnamed job", "dict"]
    [seen] = peer.batches
    assert [run["job"] for run in seen.runs] == ["ours", "theirs", "ours", "ours"]
    assert seen.ids[1] == "mine"
    assert seen.runs[3]["files"] == {"a.bin": {"base64": "/w=="}, "b.txt": "x"}
    assert seen.runs[3]["limits"] == {"timeout_s": 3.0}


async def test_malformed_item_is_named_before_anything_is_sent(peer: Peer) -> None:
    async with AsyncClient(peer.url) as client:
        with pytest.raises(BadRequest, match=r"^runs\.1\.limits\.timeout_s: "):
            client.run_batch(["fine", {"code": "", "limits": {"timeout_s": -1}}])
        with pytest.raises(BadRequest, match=r"^runs\.0\.nonsense: "):
            client.run_batch([{"code": "", "nonsense": 1}])
    assert peer.requests == []


async def test_retried_runs_land_in_their_places(peer: Peer, transport: TransportKind) -> None:
    """Case cli-003: runs refused the first time come back in their own places."""
    refused = {f"p{i}" for i in (3, 7, 41)}

    async def partial(reply: Reply) -> None:
        await reply.start()
        for run in reply.seen.runs:
            if run["code"] not in refused:
                await reply.line(run)
        refused.clear()
        await reply.end()

    peer.always = partial
    async with AsyncClient(peer.url, transport=transport) as client:
        results = await client.run_all([f"p{i}" for i in range(50)])
    assert [result.stdout for result in results] == [f"p{i}" for i in range(50)]
    assert [run["code"] for run in peer.batches[1].runs] == ["p3", "p7", "p41"]


async def test_infra_error_of_one_does_not_sink_the_batch(peer: Peer) -> None:
    """Case cli-010: 20 results, of which exactly number 5 is infra_error."""

    def result(run: Json) -> Json:
        outcome = "infra_error" if run["code"] == "p5" else "ok"
        return {"run_id": run["run_id"], "outcome": outcome}

    peer.result = result
    async with AsyncClient(peer.url) as client:
        results = await client.run_all([f"p{i}" for i in range(20)])
    assert [i for i, result in enumerate(results) if not result.ok] == [5]
    assert len(results) == 20


@pytest.mark.parametrize("ordered", [False, True])
async def test_run_without_an_answer_is_infra_error(peer: Peer, ordered: bool) -> None:
    async def never_answers_p1(reply: Reply) -> None:
        lost = any(run["code"] == "p1" for run in reply.seen.runs)
        await (cut_after(0) if lost else answer)(reply)

    peer.always = never_answers_p1
    async with AsyncClient(peer.url, max_retries=1, batch_max_runs=1) as client:
        stream = client.run_batch(["p0", "p1", "p2"], ordered=ordered)
        results = [result async for result in stream]
    if not ordered:
        results.sort(key=lambda result: result.stdout or "p1")
    assert [result.outcome for result in results] == ["ok", "infra_error", "ok"]
    assert results[1].is_infra
    assert results[1].message.startswith("TransportError: POST /v1/batches")


async def test_batch_without_any_answer_raises(peer: Peer) -> None:
    peer.always = refuse(503)
    async with AsyncClient(peer.url, max_retries=1, batch_max_runs=2) as client:
        with pytest.raises(Unavailable):
            await client.run_all(["a", "b", "c"])


async def test_run_above_the_maximum_raises(peer: Peer) -> None:
    peer.always = refuse_runs(lambda runs: [0])
    async with AsyncClient(peer.url) as client:
        with pytest.raises(BadRequest, match="above the maximum"):
            await client.run_all(["a"])


async def test_leaving_early_cancels_the_rest(peer: Peer, transport: TransportKind) -> None:
    gate = Gate()
    peer.always = hold({f"p{i}": gate for i in range(1, 4)})
    async with AsyncClient(peer.url, transport=transport) as client:
        async with aclosing(client.run_batch([f"p{i}" for i in range(4)])) as stream:
            assert (await anext(stream)).stdout == "p0"
        await peer.until(lambda: peer.requests[0].gone.is_set())
        gate.open()
    assert peer.deletes == []


async def test_deadline_of_a_batch(peer: Peer) -> None:
    gate = Gate()
    peer.always = hold({"slow": gate})
    async with AsyncClient(peer.url) as client:
        seen: list[str] = []
        with pytest.raises(DeadlineExceeded, match="1 runs of the batch"):
            async for result in client.run_batch(["quick", "slow"], timeout_s=0.5):
                seen.append(result.stdout)
        await peer.until(lambda: peer.requests[0].gone.is_set())
        gate.open()
    assert seen == ["quick"]


async def test_lines_of_megabytes_with_every_line_separator(
    peer: Peer, transport: TransportKind
) -> None:
    text = "\u2028\u2029\x85\x0b\x0c\x1c\r\n" * 400_000
    peer.result = lambda run: {"run_id": run["run_id"], "outcome": "ok", "stdout": text}
    peer.scripts.append(end_after(2, b"\n\n"))
    async with AsyncClient(peer.url, transport=transport) as client:
        results = await client.run_all(["a", "b"])
    assert all(result.stdout == text for result in results)
    assert len(peer.batches) == 1


def test_sync_batch_yields_as_runs_finish(peer: Peer, transport: TransportKind) -> None:
    gate = Gate()
    peer.always = hold({"slow": gate})
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    with Client(peer.url, transport=transport) as client:
        stream = client.run_batch(["slow", "quick"], progress=progress)
        assert next(stream).stdout == "quick"
        gate.open()
        assert [result.stdout for result in stream] == ["slow"]
        assert [r.stdout for r in client.run_batch(["a", "b"], ordered=True)] == ["a", "b"]
        assert [r.stdout for r in client.run_all(["c", "d"])] == ["c", "d"]
    assert calls == [(1, 2), (2, 2)]


def test_sync_batch_left_early_cancels_the_rest(peer: Peer) -> None:
    gate = Gate()
    peer.always = hold({"slow": gate})
    with Client(peer.url) as client:
        stream = client.run_batch(["slow", "quick"])
        next(stream)
        stream.close()
        peer.wait_until(lambda: peer.requests[0].gone.is_set())
        gate.open()


def test_sync_batch_raises_what_the_service_refuses(peer: Peer) -> None:
    peer.always = refuse(401)
    with Client(peer.url) as client:
        with pytest.raises(PermissionError):
            client.run_all(["a", "b"])
        with pytest.raises(BadRequest):
            client.run_batch([{"code": 1}])
