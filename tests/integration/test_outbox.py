"""Results leave at once where their part of the queue answers, and wait where it does not."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rollyard_queue.base import QueueUnavailable
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import FinishedRun, QueuedRun, Reply
from rollyard_queue.redis import RedisQueue
from rollyard_sandbox.outbox import Outbox

WITHIN_S = 20.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def runs(name: str, count: int) -> list[QueuedRun]:
    return [QueuedRun(f"{name}{number}", b"{}") for number in range(count)]


async def held(queue: RedisQueue, batch: list[QueuedRun]) -> list[FinishedRun]:
    """Results of a worker that has claimed these runs."""
    await queue.submit(batch, reply_to="me")
    claimed: list[FinishedRun] = []
    while len(claimed) < len(batch):
        got = await queue.claim("w", max_runs=100, lease_s=60)
        claimed += [FinishedRun(one.run_id, one.attempt, b"result") for one in got]
    return claimed


async def ids_of(queue: RedisQueue, count: int) -> set[str]:
    found: set[str] = set()
    async with asyncio.timeout(WITHIN_S):
        while len(found) < count:
            try:
                replies: list[Reply] = await queue.replies("me", max_replies=100, wait_s=1)
            except QueueUnavailable:  # a shard that was away is back: said once
                continue
            found |= {reply.run_id for reply in replies}
    return found


async def test_results_for_a_part_that_stands_still_keep_no_others(tmp_path: Path) -> None:
    async with EmbeddedServer() as stays, EmbeddedServer(directory=tmp_path) as stands:
        queue = RedisQueue.from_url(f"{stays.url},{stands.url}", shards=2)
        results = await held(queue, runs("a", 40)) + await held(queue, runs("b", 40))
        here = [one for one in results if queue.part_of(one.run_id) == 0]
        there = [one for one in results if queue.part_of(one.run_id) == 1]
        assert here and there
        outbox = Outbox(queue, "w")
        sending = asyncio.create_task(outbox.run())
        os.kill(stands.pid, signal.SIGSTOP)
        try:
            for one in there[:5] + here[:5]:
                outbox.put(one)
            assert await ids_of(queue, 5) == {one.run_id for one in here[:5]}
            # While a batch for the other part is tried again and again.
            for one in there[5:] + here[5:]:
                outbox.put(one)
            assert await ids_of(queue, len(here) - 5) == {one.run_id for one in here[5:]}
        finally:
            os.kill(stands.pid, signal.SIGCONT)
        outbox.close()
        async with asyncio.timeout(WITHIN_S):
            await sending
        assert outbox.given_up == len(outbox) == 0
        assert (await queue.stats()).finished_total == 80
        late = await ids_of(queue, len(there))
        assert late == {one.run_id for one in there}
        await queue.close()


async def test_all_is_sent_before_the_end_and_counted_while_it_waits() -> None:
    async with EmbeddedServer() as server:
        queue = RedisQueue.from_url(server.url, shards=3)
        assert queue.parts == 3
        results = await held(queue, runs("r", 30))
        outbox = Outbox(queue, "w")
        for one in results:
            outbox.put(one)
        assert len(outbox) == 30
        assert not outbox.full
        outbox.close()
        await outbox.run()
        assert len(outbox) == 0
        assert await ids_of(queue, 30) == {one.run_id for one in results}
        await queue.close()


def test_many_bytes_that_wait_make_it_full() -> None:
    queue = RedisQueue.from_url("redis://127.0.0.1:1", shards=2)
    outbox = Outbox(queue, "w")
    big = b"x" * (16 << 20)
    for number in range(5):
        assert not outbox.full
        outbox.put(FinishedRun(str(number), 1, big))
    assert outbox.full
