"""What the queue says and keeps when its server is down, full, read-only or forgetful."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    ResponseError,
)

from rollyard_queue.base import QueueError, QueueUnavailable
from rollyard_queue.connections import Server
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.failures import as_queue_error
from rollyard_queue.records import FinishedRun, Notice, QueuedRun, Reply
from rollyard_queue.redis import RedisQueue


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def embedded(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(directory=tmp_path) as server:
        yield server


@pytest.fixture
async def server(embedded: EmbeddedServer) -> AsyncIterator[Server]:
    server = Server.from_url(embedded.url)
    yield server
    await server.close()


@pytest.fixture
async def queue(embedded: EmbeddedServer) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue.from_url(embedded.url)
    yield queue
    await queue.close()


def runs(count: int, payload: bytes = b"{}") -> list[QueuedRun]:
    return [QueuedRun(f"r{number}", payload) for number in range(count)]


EVERY_METHOD: dict[str, Callable[[RedisQueue], Awaitable[object]]] = {
    "submit": lambda queue: queue.submit(runs(1), reply_to="gw"),
    "cancel": lambda queue: queue.cancel(["r0"]),
    "wait": lambda queue: queue.wait("w", for_work=True, wait_s=0),
    "claim": lambda queue: queue.claim("w", max_runs=1, lease_s=1),
    "renew": lambda queue: queue.renew("w", ["r0"], lease_s=1),
    "finish": lambda queue: queue.finish("w", [FinishedRun("r0", 1, b"")]),
    "release": lambda queue: queue.release("w", ["r0"]),
    "announce": lambda queue: queue.announce("w", slots=1, ttl_s=1),
    "retire": lambda queue: queue.retire("w"),
    "reap": lambda queue: queue.reap(),
    "replies": lambda queue: queue.replies("gw", max_replies=1, wait_s=0),
    "stats": lambda queue: queue.stats(),
    "ping": lambda queue: queue.ping(),
}


@pytest.mark.parametrize("method", EVERY_METHOD)
async def test_without_a_server_every_method_says_unavailable(tmp_path: Path, method: str):
    queue = RedisQueue.from_url(f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(QueueUnavailable):
        await EVERY_METHOD[method](queue)
    await queue.close()


async def test_after_a_restart_the_queue_works_again(embedded: EmbeddedServer, queue: RedisQueue):
    await queue.submit(runs(1), reply_to="gw")
    blocked = asyncio.create_task(queue.wait("other", for_work=False, wait_s=60))
    reading = asyncio.create_task(queue.replies("gw", max_replies=1, wait_s=60))
    await queue.ping()
    os.kill(embedded.pid, signal.SIGKILL)
    for task in (blocked, reading):
        with pytest.raises(QueueUnavailable):
            await task
    with pytest.raises(QueueUnavailable):
        await queue.ping()
    await embedded.stop()
    await embedded.start()
    # All of the old server's scripts, runs and connections are gone; nobody needs to be told.
    assert [receipt.state for receipt in await queue.submit(runs(1), reply_to="gw")] == ["accepted"]
    assert await queue.wait("w", for_work=True, wait_s=1) == Notice(work=True)
    [delivery] = await queue.claim("w", max_runs=1, lease_s=60)
    assert await queue.finish("w", [FinishedRun(delivery.run_id, 1, b"result")]) == [True]
    assert await queue.replies("gw", max_replies=1, wait_s=1) == [Reply("r0", b"result")]


async def test_a_server_that_forgot_the_scripts_gets_them_again(server: Server, queue: RedisQueue):
    await queue.stats()
    await server.command("SCRIPT", "FLUSH")
    await asyncio.gather(*(queue.stats() for _ in range(20)))


async def test_a_full_server_refuses_work_and_still_finishes_it(server: Server, queue: RedisQueue):
    await queue.submit(runs(10, b"x" * 10_000), reply_to="gw")
    await server.command("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(QueueUnavailable, match="memory"):
        await queue.submit([QueuedRun("more", b"{}")], reply_to="gw")
    assert await queue.cancel(["r9"]) == ["queued"]
    deliveries = await queue.claim("w", max_runs=10, lease_s=0)
    assert await queue.reap() == len(deliveries) == 9
    deliveries = await queue.claim("w", max_runs=10, lease_s=60)
    assert await queue.release("w", ["r8"]) == 1
    finished = [FinishedRun(one.run_id, one.attempt, b"result") for one in deliveries]
    assert await queue.finish("w", finished) == [True] * 8 + [False]
    assert len(await queue.replies("gw", max_replies=100, wait_s=1)) == 9
    await queue.announce("w", slots=1, ttl_s=1)
    assert (await queue.stats()).queued == 1


async def test_a_read_only_server_is_unavailable(server: Server, queue: RedisQueue):
    await server.command("REPLICAOF", "127.0.0.1", 1)
    with pytest.raises(QueueUnavailable):
        await queue.submit(runs(1), reply_to="gw")
    with pytest.raises(QueueUnavailable):
        await queue.claim("w", max_runs=1, lease_s=1)
    await server.command("REPLICAOF", "NO", "ONE")
    assert len(await queue.submit(runs(1), reply_to="gw")) == 1


async def test_a_stopped_server_is_unavailable_and_no_call_hangs(
    embedded: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollyard_queue.connections.BLOCK_MARGIN_S", 0.2)
    monkeypatch.setattr("rollyard_queue.connections.COMMAND_TIMEOUT_S", 0.2)
    queue = RedisQueue.from_url(embedded.url)
    await queue.ping()
    os.kill(embedded.pid, signal.SIGSTOP)
    try:
        with pytest.raises(QueueUnavailable, match="stopped answering"):
            await queue.replies("gw", max_replies=1, wait_s=0.1)
        with pytest.raises(QueueUnavailable):
            await queue.stats()
    finally:
        os.kill(embedded.pid, signal.SIGCONT)
    assert (await queue.stats()).queued == 0
    await queue.close()


async def test_a_refused_command_is_not_taken_for_a_server_that_is_down(server: Server):
    with pytest.raises(QueueError) as refused:
        await server.command("NO-SUCH-COMMAND")
    assert not isinstance(refused.value, QueueUnavailable)
    await server.command("LPUSH", "a-list", "1")
    for _ in range(20):
        with pytest.raises(QueueError, match="WRONGTYPE"):
            await server.block([("GET", "a-list"), ("PING",)], wait_s=1)
        # The unread PONG must not be taken for this answer.
        assert await server.block([("LLEN", "a-list")], wait_s=1) == [1]


@pytest.mark.parametrize(
    ("error", "unavailable"),
    [
        (BusyLoadingError("Redis is loading the dataset in memory"), True),
        (ClusterDownError("The cluster is down"), True),
        (ResponseError("BUSY Redis is busy running a script"), True),
        (ResponseError("MISCONF disk"), True),
        (OSError(5, "input/output error"), True),
        (NoPermissionError("this user has no permissions"), True),
        (ResponseError("ERR syntax error"), False),
    ],
)
def test_what_counts_as_unavailable(error: Exception, unavailable: bool):
    assert isinstance(as_queue_error(error), QueueUnavailable) == unavailable


async def test_a_cancelled_caller_spoils_no_connection(queue: RedisQueue):
    """Calls cancelled at any moment: no other call may get an answer that is not its own."""
    await queue.submit(runs(300), reply_to="gw")

    async def cancelled_after(steps: int, call: Awaitable[object]) -> None:
        task = asyncio.ensure_future(call)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def calls(number: int) -> list[Awaitable[object]]:
        return [
            queue.claim("w", max_runs=1, lease_s=60),
            queue.wait("w", for_work=True, wait_s=1),
            queue.replies(f"other{number}", max_replies=1, wait_s=1),
        ]

    claimed = 0
    for steps in range(12):
        await asyncio.gather(
            *(cancelled_after(steps, call) for number in range(10) for call in calls(number))
        )
        stats = await queue.stats()
        assert stats.queued + stats.leased == 300
        assert stats.leased >= claimed
        claimed = stats.leased
        assert await queue.renew("w", ["unknown"], lease_s=1) == ["unknown"]


async def test_a_command_of_a_cancelled_caller_runs_to_its_end(embedded: EmbeddedServer):
    queue = RedisQueue.from_url(embedded.url)
    submitting = asyncio.create_task(queue.submit(runs(100), reply_to="gw"))
    await asyncio.sleep(0)
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    await queue.close()
    again = RedisQueue.from_url(embedded.url)
    assert (await again.stats()).queued == 100
    await again.close()


async def test_one_run_deleted_by_hand_does_not_stop_the_queue(server: Server, queue: RedisQueue):
    await queue.submit(runs(4), reply_to="gw")
    await queue.claim("w", max_runs=2, lease_s=0)
    for key in ("runs", "payloads"):
        await server.command("HDEL", "{rollyard:0}:" + key, "r0", "r2")
    assert await queue.reap() == 2
    assert [one.run_id for one in await queue.claim("w", max_runs=9, lease_s=1)] == ["r1", "r3"]


async def test_every_key_has_the_queues_hash_tag(server: Server, queue: RedisQueue):
    await queue.submit(runs(3), reply_to="gw")
    await queue.announce("w", slots=1, ttl_s=60)
    await queue.claim("w", max_runs=2, lease_s=60)
    await queue.cancel(["r0"])
    keys = cast("list[bytes]", await server.command("KEYS", "*"))
    assert len(keys) >= 9
    assert all(key.startswith(b"{rollyard:0}:") for key in keys)
