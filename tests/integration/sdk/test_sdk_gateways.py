"""Several gateways of one service: share the work, fail over, come back."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from rollyard import AsyncClient, Client, Conflict, DeadlineExceeded, Unavailable, _patience
from rollyard._config import TransportKind

from .peer import Gate, Peer, Reply, Serving, answer, cut_after, hold, refuse


@pytest.fixture
def other() -> Iterator[Peer]:
    with Serving(Peer()) as serving:
        yield serving


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return unused.getsockname()[1]


async def test_gateways_share_the_work(peer: Peer, other: Peer, transport: TransportKind) -> None:
    programs = [f"p{i}" for i in range(1000)]
    async with AsyncClient([peer.url, other.url], transport=transport) as client:
        results = await client.run_all(programs)
        assert [load.address for load in client.load.gateways] == [peer.url, other.url]
    assert [result.stdout for result in results] == programs
    shares = [sum(len(seen.runs) for seen in one.batches) for one in (peer, other)]
    assert sum(shares) == 1000
    assert min(shares) > 200


def test_addresses_come_from_the_environment_with_commas(
    peer: Peer, other: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLYARD_URL", f"{peer.url}, {other.url}/,{peer.url}")
    with Client(batch_max_runs=8) as client:
        assert all(result.ok for result in client.run_all(["p"] * 64))
        assert len(client.load.gateways) == 2
    assert peer.batches
    assert other.batches


@pytest.mark.parametrize("fault", [refuse(503, "unavailable"), cut_after(0), cut_after(3)])
async def test_runs_of_a_gateway_that_fails_go_to_the_other(
    peer: Peer, other: Peer, transport: TransportKind, fault: object
) -> None:
    peer.always = fault  # type: ignore[assignment]
    peer.short_scripts.extend([refuse(503)] * 1000)
    programs = [f"p{i}" for i in range(300)]
    async with AsyncClient([peer.url, other.url], transport=transport) as client:
        for _ in range(3):
            results = await asyncio.gather(*(client.run(code) for code in programs))
            assert [result.stdout for result in results] == programs
        failed = len(peer.batches)
        assert client.load.gateways[0].failures > 0
        await client.run_all(programs)
    assert len(peer.batches) == failed <= 5  # it got no run while it did not say it was ready


async def test_gateway_that_is_not_there_costs_no_run(peer: Peer, transport: TransportKind) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    async with AsyncClient([nobody, peer.url], max_retries=1, transport=transport) as client:
        results = await asyncio.gather(*(client.run(f"p{i}") for i in range(200)))
        assert all(result.ok for result in results)
        assert await client.healthy()
        assert await client.ready()
        assert await client.cancel("some-run")


async def test_gateway_that_comes_back_gets_runs_again(
    peer: Peer, other: Peer, transport: TransportKind
) -> None:
    gate = Gate()
    peer.scripts.append(refuse(503))
    peer.short_scripts.extend([refuse(503), refuse(503)])
    async with AsyncClient([peer.url, other.url], transport=transport) as client:
        assert (await client.run("first")).ok
        await peer.until(lambda: len(peer.of("GET")) == 3)
        other.always = hold({f"p{i}": gate for i in range(1000)})
        running = [asyncio.ensure_future(client.run(f"p{i}")) for i in range(1000)]
        await peer.until(lambda: len(peer.batches) > 1)
        gate.open()
        assert all(result.ok for result in await asyncio.gather(*running))
        assert client.load.gateways[0].failures == 0


async def test_drained_stream_is_continued_elsewhere(
    peer: Peer, other: Peer, transport: TransportKind
) -> None:
    """A gateway that stops cuts its streams; the runs go on, and their ids find them again."""
    draining = Gate()

    async def drain(reply: Reply) -> None:
        reply.peer.gates.append(draining)
        await reply.start()
        await reply.line(reply.seen.runs[0])
        await draining.passed()
        reply.cut(reset=False)

    peer.scripts.append(drain)
    peer.always = refuse(503)
    async with AsyncClient([peer.url, other.url], transport=transport) as client:
        calls = [asyncio.ensure_future(client.run(f"p{i}")) for i in range(5)]
        await calls[0]
        draining.open()
        assert [(await call).stdout for call in calls] == [f"p{i}" for i in range(5)]
    assert other.batches[0].ids == peer.batches[0].ids[1:]


async def test_lone_gateway_that_drains_is_waited_for(
    transport: TransportKind, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens for a while; the calls wait as long as their own time allows."""
    port = free_port()
    async with AsyncClient(f"http://127.0.0.1:{port}", transport=transport) as client:
        calls = [asyncio.ensure_future(client.run(f"p{i}", timeout_s=60)) for i in range(3)]
        while "does not work" not in caplog.text:
            await asyncio.sleep(0.01)
        with Serving(Peer(), port=port):
            assert all([(await call).ok for call in calls])
    assert "works again" in caplog.text


async def test_time_out_names_the_trouble(peer: Peer) -> None:
    peer.always = refuse(503)
    async with AsyncClient(peer.url) as client:
        with pytest.raises(DeadlineExceeded, match=r"no result within 0\.3 s \(503: scripted 503"):
            await client.run("p", timeout_s=0.3)
        with pytest.raises(DeadlineExceeded, match=r"2 runs of the batch.*scripted 503"):
            await client.run_all(["p", "q"], timeout_s=0.3)


async def test_without_a_time_out_patience_ends(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_patience, "PATIENCE_S", 0.2)
    async with AsyncClient(peer.url) as client:
        await client.run("it works")
        peer.always = refuse(503)
        errors = await asyncio.gather(
            *(client.run(f"p{i}") for i in range(300)), return_exceptions=True
        )
        assert {type(error) for error in errors} == {Unavailable}
        peer.always = answer
        assert (await client.run("it works again")).ok


async def test_id_of_another_program_is_a_conflict(peer: Peer) -> None:
    async def taken(reply: Reply) -> None:
        places = [i for i, run in enumerate(reply.seen.runs) if run["run_id"] == "taken"]
        if not places:
            await answer(reply)
            return
        problem = {"field": f"runs.{places[0]}.run_id", "message": "belongs to another program"}
        await refuse(409, "conflict", problems=[problem])(reply)

    peer.always = taken
    async with AsyncClient(peer.url) as client:
        mine, others = await asyncio.gather(
            asyncio.gather(client.run("p", run_id="taken"), return_exceptions=True),
            asyncio.gather(*(client.run(f"p{i}") for i in range(5))),
        )
    assert all(result.ok for result in others)
    assert isinstance(mine[0], Conflict)
    assert isinstance(mine[0], ValueError)
    assert "belongs to another program" in str(mine[0])
    assert mine[0].run_id == "taken"
