"""What the SDK does when the service or the network fails."""

import asyncio
import socket
import time
from unittest import mock

import pytest

from rollyard import (
    AsyncClient,
    BadRequest,
    DeadlineExceeded,
    Overloaded,
    PayloadTooLarge,
    RunResult,
    TransportError,
    Unauthorized,
    Unavailable,
    _call,
)
from rollyard._config import TransportKind

from .peer import (
    Gate,
    Json,
    Peer,
    Reply,
    Script,
    answer,
    cut_after,
    end_after,
    hold,
    refuse,
    refuse_runs,
)


async def run_all_at_once(client: AsyncClient, count: int) -> list[RunResult]:
    return await asyncio.gather(*(client.run(f"p{i}") for i in range(count)))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(refuse(408), id="408"),
        pytest.param(refuse(429, "overloaded"), id="429"),
        pytest.param(refuse(502), id="502"),
        pytest.param(refuse(503), id="503"),
        pytest.param(refuse(504), id="504"),
        pytest.param(cut_after(0), id="reset before the answer"),
        pytest.param(cut_after(0, reset=False), id="closed before the answer"),
        pytest.param(cut_after(2), id="reset mid-stream"),
        pytest.param(cut_after(2, reset=False), id="closed mid-stream"),
        pytest.param(end_after(2), id="ended early"),
        pytest.param(end_after(2, b'{"run_id":'), id="ended within a line"),
        pytest.param(end_after(2, b"garbage\n"), id="garbled line"),
    ],
)
async def test_fault_is_retried_with_the_same_ids(
    peer: Peer, transport: TransportKind, fault: Script
) -> None:
    peer.scripts.append(fault)
    async with AsyncClient(peer.url, transport=transport) as client:
        results = await run_all_at_once(client, 5)
    assert [result.stdout for result in results] == [f"p{i}" for i in range(5)]
    first, second = peer.batches
    # A reset may overtake the lines sent before it: then those runs are asked for again.
    assert second.ids == first.ids[-len(second.ids) :]


@pytest.mark.parametrize("fault", [end_after(3), cut_after(3, reset=False)])
async def test_only_runs_without_an_answer_are_sent_again(
    peer: Peer, transport: TransportKind, fault: Script
) -> None:
    peer.scripts.append(fault)
    async with AsyncClient(peer.url, transport=transport) as client:
        await run_all_at_once(client, 5)
    assert peer.batches[1].ids == peer.batches[0].ids[3:]


async def test_progress_starts_the_count_of_retries_anew(peer: Peer) -> None:
    peer.always = end_after(1)
    async with AsyncClient(peer.url, max_retries=1) as client:
        results = await run_all_at_once(client, 4)
    assert all(result.ok for result in results)
    assert [len(seen.runs) for seen in peer.batches] == [4, 3, 2, 1]


async def test_retry_after_is_waited_for(peer: Peer, transport: TransportKind) -> None:
    peer.scripts.append(refuse(429, "overloaded", retry_after="1"))
    started = time.monotonic()
    async with AsyncClient(peer.url, transport=transport) as client:
        await client.run("p")
    assert 1.0 <= time.monotonic() - started < 5.0


async def test_service_fault_is_no_wrong_answer(peer: Peer, transport: TransportKind) -> None:
    """Case cli-001: five times 503 raises Unavailable, and never returns a result."""
    peer.scripts.extend([refuse(503)] * 5)
    async with AsyncClient(peer.url, max_retries=4, transport=transport) as client:
        with pytest.raises(Unavailable, match=r"scripted 503.*after 5 tries") as caught:
            await client.run("print(1)")
    assert caught.value.status == 503
    assert caught.value.request_id == "req-1"
    assert len(peer.batches) == 5


async def test_overloaded_says_how_long_to_wait(peer: Peer) -> None:
    peer.always = refuse(429, "overloaded", retry_after="0.05")
    async with AsyncClient(peer.url, max_retries=1) as client:
        with pytest.raises(Overloaded) as caught:
            await client.run("p")
    assert caught.value.retry_after_s == 0.05
    assert len(peer.batches) == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (401, Unauthorized),
        (403, Unauthorized),
        (404, BadRequest),
        (413, PayloadTooLarge),
        (422, BadRequest),
        (500, Unavailable),
        (302, BadRequest),
    ],
)
async def test_other_statuses_are_not_retried(
    peer: Peer, transport: TransportKind, status: int, error: type[Exception]
) -> None:
    peer.always = refuse(status)
    async with AsyncClient(peer.url, transport=transport) as client:
        with pytest.raises(error):
            await client.run("p")
    assert len(peer.requests) == 1


async def test_timeout_of_the_code_is_a_result(peer: Peer) -> None:
    """Case cli-002: the program's own time-out comes back at once, from one request."""
    peer.result = lambda run: {"run_id": run["run_id"], "outcome": "timeout"}
    async with AsyncClient(peer.url) as client:
        result = await client.run("while True: pass\n", limits={"timeout_s": 2})
    assert result.outcome == "timeout"
    assert len(peer.requests) == 1


def above_maximum(runs: list[Json]) -> list[int]:
    return [i for i, run in enumerate(runs) if run["code"] in ("p1", "p6")]


@pytest.mark.parametrize("named", [True, False])
async def test_refused_member_does_not_poison_its_neighbours(
    peer: Peer, transport: TransportKind, named: bool
) -> None:
    peer.always = refuse_runs(above_maximum, named=named)
    async with AsyncClient(peer.url, transport=transport) as client:
        results = await asyncio.gather(
            *(client.run(f"p{i}") for i in range(8)), return_exceptions=True
        )
    refused = [i for i, result in enumerate(results) if isinstance(result, BadRequest)]
    assert refused == [1, 6]
    assert all(isinstance(results[i], RunResult) for i in (0, 2, 3, 4, 5, 7))
    if named:
        assert "limits.timeout_s: above the maximum" in str(results[6])
        assert len(peer.batches) == 2


async def test_too_large_together_is_sent_apart(peer: Peer) -> None:
    async def at_most_two(reply: Reply) -> None:
        script = refuse(413, "too_large") if len(reply.seen.runs) > 2 else answer
        await script(reply)

    peer.always = at_most_two
    async with AsyncClient(peer.url) as client:
        assert all(result.ok for result in await run_all_at_once(client, 7))


async def test_no_server_is_a_transport_error(transport: TransportKind) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    async with AsyncClient(url, max_retries=2, transport=transport) as client:
        with pytest.raises(TransportError, match="after 3 tries") as caught:
            await client.run("p")
        assert not isinstance(caught.value, DeadlineExceeded)
        assert not await client.healthy()


async def test_bug_in_the_transport_leaves_no_caller_waiting(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    broken = mock.patch("rollyard._exchange.LineSplitter.feed", side_effect=RuntimeError("bug"))
    async with AsyncClient(peer.url) as client:
        with broken, pytest.raises(TransportError, match="RuntimeError: bug"):
            await client.run("p")
    assert "exchange failed" in caplog.text


async def test_service_that_comes_back_is_found(transport: TransportKind, peer: Peer) -> None:
    peer.scripts.extend([cut_after(0)] * 3)
    async with AsyncClient(peer.url, transport=transport) as client:
        assert (await client.run("p")).ok
    assert len({tuple(seen.ids) for seen in peer.batches}) == 1


async def test_deadline_of_a_call_ends_it_and_its_run(peer: Peer, transport: TransportKind) -> None:
    gate = Gate()
    peer.always = hold({"slow": gate, "neighbour": gate})
    async with AsyncClient(peer.url, transport=transport) as client:
        neighbour = asyncio.ensure_future(client.run("neighbour"))
        with pytest.raises(DeadlineExceeded, match=r"no result within 0\.3 s") as caught:
            await client.run("slow", timeout_s=0.3)
        assert isinstance(caught.value, TimeoutError)
        [late] = [run["run_id"] for run in peer.batches[0].runs if run["code"] == "slow"]
        await peer.until(lambda: peer.deletes == [late])
        gate.open()
        assert (await neighbour).ok


async def test_deadline_bounds_retries(peer: Peer) -> None:
    peer.always = refuse(503, retry_after="30")
    async with AsyncClient(peer.url, timeout_s=0.3) as client:
        with pytest.raises(DeadlineExceeded):
            await client.run("p")
        with pytest.raises(DeadlineExceeded):
            await client.run_all(["p", "q"])


async def test_deadline_keeps_a_run_whose_id_the_caller_chose(peer: Peer) -> None:
    gate = Gate()
    peer.scripts.append(hold({"slow": gate}))
    async with AsyncClient(peer.url) as client:
        with pytest.raises(DeadlineExceeded):
            await client.run("slow", run_id="mine-1", timeout_s=0.2)
        gate.open()
        assert (await client.run("slow", run_id="mine-1")).ok
    assert peer.deletes == []


async def test_silence_within_queue_and_run_time_is_no_fault(
    peer: Peer, transport: TransportKind
) -> None:
    """Case cli-009: a long wait in the queue does not multiply requests.

    The case waits 70 s; here all times are a hundredth, and test_sdk_call checks the full ones.
    """
    gate = Gate()
    peer.always = hold({"print(1)": gate})
    with mock.patch.multiple(_call, QUEUE_ALLOWANCE_S=6.0, MARGIN_S=0.6):
        async with AsyncClient(peer.url, transport=transport) as client:
            waiting = asyncio.ensure_future(client.run("print(1)", limits={"timeout_s": 0.05}))
            done, _ = await asyncio.wait([waiting], timeout=0.7)
            assert not done
            gate.open()
            assert (await waiting).stdout == "print(1)"
    assert len(peer.requests) == 1


async def test_silence_beyond_them_is_asked_again(peer: Peer, transport: TransportKind) -> None:
    peer.scripts.append(hold({"p": Gate()}))
    with mock.patch.object(_call, "MARGIN_S", 0.2):
        async with AsyncClient(peer.url, transport=transport) as client:
            result = await client.run("p", deadline_s=0.1, limits={"timeout_s": 0.1})
    assert result.ok
    assert len({tuple(seen.ids) for seen in peer.batches}) == 1
    assert len(peer.batches) == 2


async def test_retry_does_not_prolong_the_deadline_to_start(peer: Peer) -> None:
    peer.scripts.extend([refuse(503, retry_after="0.5"), refuse(503, retry_after="0.5")])
    async with AsyncClient(peer.url) as client:
        await client.run("p", deadline_s=0.8)
    first, second, third = (seen.runs[0]["deadline_s"] for seen in peer.batches)
    assert 0.5 < first <= 0.8
    assert 0 < second <= 0.3
    assert third == 0.001


async def test_limit_reaches_the_service(peer: Peer) -> None:
    """Case cli-011: the time limit travels, also where it equals the default."""
    async with AsyncClient(peer.url) as client:
        await client.run("print(1)", limits={"timeout_s": 1.5})
        await client.run("print(1)", limits={"timeout_s": 10.0})
        await client.run("print(1)", limits={"timeout_s": 1.5}, timeout_s=5)
    sent = [seen.runs[0]["limits"] for seen in peer.batches]
    assert sent == [{"timeout_s": 1.5}, {"timeout_s": 10.0}, {"timeout_s": 1.5}]
