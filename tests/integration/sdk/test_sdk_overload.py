"""A service that is full is not hammered, and everybody gets an answer in the end."""

import asyncio
import threading

import pytest

from rollyard import AsyncClient, Client, Overloaded
from rollyard._config import TransportKind
from rollyard._window import MAX_RUNS

from .peer import Gate, Peer, Reply, answer, hold, refuse


class Bounded:
    """Script of a service that holds so many runs at most, and refuses what is above, whole."""

    def __init__(self, capacity: int, *, status: int = 429, wait: str = "0.02") -> None:
        self.capacity = capacity
        self.held = self.most = self.admitted = self.refused = 0
        self._refuse = refuse(status, "overloaded", retry_after=wait)
        self._lock = threading.Lock()

    async def __call__(self, reply: Reply) -> None:
        runs = reply.seen.runs
        if self.held + len(runs) > self.capacity:
            self.refused += len(runs)
            await self._refuse(reply)
            return
        self.held += len(runs)
        self.admitted += len(runs)
        self.most = max(self.most, self.held)
        await reply.start()
        while not self.refused:  # every test asks for more than it holds
            await asyncio.sleep(0.001)
        for run in runs:  # one after the other, and other requests in between
            await asyncio.sleep(0)
            self.held -= 1
            await reply.line(run)
        await reply.end()


@pytest.mark.parametrize("status", [429, 503])
async def test_service_at_three_times_its_capacity(
    peer: Peer, transport: TransportKind, status: int
) -> None:
    peer.always = service = Bounded(160, status=status)
    programs = [f"p{i}" for i in range(480)]
    async with AsyncClient(peer.url, transport=transport) as client:
        results = await asyncio.gather(*(client.run(code) for code in programs))
        load = client.load
    assert [result.stdout for result in results] == programs
    assert service.admitted == len(programs)
    # The first burst is refused in part, once; after that hardly anything is sent in vain.
    assert 0 < service.refused <= len(programs)
    assert load.gateways[0].refused == service.refused
    assert load.gateways[0].window < MAX_RUNS
    assert (load.waiting, load.in_flight, load.gateways[0].in_flight) == (0, 0, 0)


async def test_sustained_overload_costs_few_refusals(peer: Peer) -> None:
    """Closed loops that want three times what the service holds, for several of its queues."""
    peer.always = service = Bounded(100)
    async with AsyncClient(peer.url) as client:

        async def loop(number: int) -> None:
            for step in range(8):
                assert (await client.run(f"{number}.{step}")).ok

        await asyncio.gather(*(loop(number) for number in range(300)))
    assert service.admitted == 2400
    assert service.refused < 2400 / 3
    assert service.most <= 100


async def test_batch_larger_than_the_queue_gets_smaller(peer: Peer) -> None:
    peer.always = service = Bounded(10)
    async with AsyncClient(peer.url) as client:
        results = await client.run_all([f"p{i}" for i in range(50)])
    assert all(result.ok for result in results)
    assert service.most <= 10


async def test_what_waits_is_seen_in_load(peer: Peer, transport: TransportKind) -> None:
    gate = Gate()
    peer.always = hold({f"p{i}": gate for i in range(3)})
    async with AsyncClient(peer.url, max_connections=1, transport=transport) as client:
        assert client.load.gateways == ()
        first = asyncio.ensure_future(client.run("p0"))
        await peer.until(lambda: len(peer.requests) == 1)
        others = [asyncio.ensure_future(client.run(f"p{i}")) for i in (1, 2)]
        await asyncio.sleep(0)
        load = client.load
        assert (load.waiting, load.in_flight) == (2, 1)
        assert load.gateways[0].address == peer.url
        assert load.gateways[0].window == MAX_RUNS
        gate.open()
        await asyncio.gather(first, *others)
        assert (client.load.waiting, client.load.in_flight) == (0, 0)


def test_threads_share_one_window(peer: Peer) -> None:
    peer.scripts.append(refuse(429, "overloaded", retry_after="0"))
    peer.always = answer
    with Client(peer.url) as client:
        assert client.run("p").ok
        [gateway] = client.load.gateways
    assert gateway.refused == 1
    assert gateway.window == 64


async def test_queue_that_stays_full_is_told(peer: Peer) -> None:
    peer.always = refuse(503, "overloaded", retry_after="0.01")
    async with AsyncClient(peer.url, max_retries=2) as client:
        errors = await asyncio.gather(
            *(client.run(f"p{i}") for i in range(200)), return_exceptions=True
        )
    assert {type(error) for error in errors} == {Overloaded}
    # What one request learns holds for all that wait: not each of the 200 asks three times.
    assert sum(len(seen.runs) for seen in peer.batches) < 3 * 200
