"""A queue in several parts: on one server, on two, in a cluster, behind a sentinel."""

import asyncio
import contextlib
import itertools
import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast
from zlib import crc32

import pytest
from cluster import RedisCluster, WatchedPair, redis_cluster, watched_pair
from queue_server import lapse
from redis.crc import key_slot
from traffic import Traffic

from rollyard_queue.base import QueueFull, QueueUnavailable, RunIdTaken
from rollyard_queue.connections import Server
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import Delivery, FinishedRun, Notice, QueuedRun, Reply
from rollyard_queue.redis import RedisQueue
from rollyard_queue.shard import KEYS

SHARDS = 4


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def servers() -> AsyncIterator[list[EmbeddedServer]]:
    async with EmbeddedServer() as one, EmbeddedServer() as two:
        yield [one, two]


@pytest.fixture
async def queue(servers: list[EmbeddedServer]) -> AsyncIterator[RedisQueue]:
    url = ",".join(server.url for server in servers)
    queue = RedisQueue.from_url(url, name=uuid.uuid4().hex, shards=SHARDS, max_queued=400)
    yield queue
    await queue.close()


def runs(count: int) -> list[QueuedRun]:
    return [QueuedRun(f"r{number}", b"{}") for number in range(count)]


def done(delivery: Delivery, result: bytes = b"result") -> FinishedRun:
    return FinishedRun(delivery.run_id, delivery.attempt, result)


async def claim_all(queue: RedisQueue, worker: str = "w") -> list[Delivery]:
    return await queue.claim(worker, max_runs=1024, lease_s=60)


async def read(queue: RedisQueue, count: int, reply_to: str = "gw") -> list[Reply]:
    """As many replies as are expected; a look afterwards finds no more."""
    replies: list[Reply] = []
    async with asyncio.timeout(20):
        while len(replies) < count:
            replies += await queue.replies(reply_to, max_replies=7, wait_s=5)
    replies += await queue.replies(reply_to, max_replies=7, wait_s=0)
    return replies


# Spread over two servers


async def test_a_batch_goes_through_all_shards_and_leaves_only_what_expires(
    queue: RedisQueue, servers: list[EmbeddedServer]
):
    receipts = await queue.submit(runs(100), reply_to="gw")
    assert [receipt.run_id for receipt in receipts] == [run.run_id for run in runs(100)]
    assert {receipt.state for receipt in receipts} == {"accepted"}
    assert (await queue.stats()).queued == 100
    claimed = await claim_all(queue)
    assert sorted(one.run_id for one in claimed) == sorted(run.run_id for run in runs(100))
    assert await queue.renew("w", ["r1", "unknown", "r2"], lease_s=60) == ["unknown"]
    assert await queue.release("w", ["r1", "r2", "unknown"]) == 2
    assert await queue.finish("w", [done(one) for one in claimed]) == [
        one.run_id not in ("r1", "r2") for one in claimed
    ]
    assert await queue.cancel(["r3", "r1", "unknown"]) == ["done", "queued", "unknown"]
    assert await queue.finish("w", [done(one) for one in await claim_all(queue)]) == [True]
    replies = await read(queue, 100)
    assert Counter(reply.run_id for reply in replies) == Counter(run.run_id for run in runs(100))
    again = await queue.submit(runs(3), reply_to="gw")
    assert [receipt.state for receipt in again] == ["done"] * 3
    stats = await queue.stats()
    assert (stats.queued, stats.leased, stats.finished_total) == (0, 0, 100)
    for one in servers:
        server = Server.from_url(one.url)
        keys = cast("list[bytes]", await server.command("KEYS", "*"))
        assert keys
        assert all([cast("int", await server.command("PTTL", key)) > 0 for key in keys])
        await server.close()


async def test_a_batch_that_one_shard_refuses_leaves_nothing_on_the_others(queue: RedisQueue):
    # 100 for each shard; the shard of an id never changes.
    ids = [f"r{number}" for number in range(1000)]
    of_first = [run_id for run_id in ids if crc32(run_id.encode()) % SHARDS == 0]
    of_others = [run_id for run_id in ids if run_id not in of_first]
    batch = [QueuedRun(run_id, b"{}") for run_id in of_others[:50] + of_first[:101]]
    with pytest.raises(QueueFull, match="100") as refused:
        await queue.submit(batch, reply_to="gw")
    assert 0.1 <= refused.value.retry_after_s <= 30
    assert (await queue.stats()).queued == 0
    assert await claim_all(queue) == []
    await queue.submit(batch[1:-1], reply_to="gw")
    assert (await queue.stats()).queued == 149
    await queue.cancel([run.run_id for run in batch])


async def test_an_id_that_is_taken_on_one_shard_leaves_nothing_on_the_others(queue: RedisQueue):
    old = [QueuedRun(f"r{number}", b"{}", digest=b"content1") for number in (1, 2, 3, 4)]
    await queue.submit(old, reply_to="gw")
    assert len({queue.part_of(run.run_id) for run in old}) > 1
    new = [QueuedRun(f"r{number}", b"{}", digest=b"content2") for number in range(40)]
    with pytest.raises(RunIdTaken, match="another program") as refused:
        await queue.submit(new, reply_to="other")
    assert sorted(refused.value.run_ids) == ["r1", "r2", "r3", "r4"]
    assert (await queue.stats()).queued == 4
    await queue.cancel([run.run_id for run in old])


async def test_a_few_slots_drain_every_shard_and_serve_every_job(queue: RedisQueue):
    await queue.submit(
        [QueuedRun(f"{job}{n}", b"{}", job) for job in ("a", "b") for n in range(80)],
        reply_to="gw",
    )
    jobs: list[str] = []
    while claimed := await queue.claim("w", max_runs=3, lease_s=60):
        assert len(claimed) == 3 or len(jobs) + len(claimed) == 160
        jobs += [one.run_id[0] for one in claimed]
    assert Counter(jobs) == {"a": 80, "b": 80}
    first_half = Counter(jobs[:80])
    assert min(first_half.values()) >= 30


async def test_idle_workers_wake_for_any_shard(queue: RedisQueue):
    for run in runs(20):
        waiting = asyncio.create_task(queue.wait("w", for_work=True, wait_s=30))
        await asyncio.sleep(0)
        await queue.submit([run], reply_to="gw")
        while not (await waiting).work:  # a token of an earlier run may come first
            waiting = asyncio.create_task(queue.wait("w", for_work=True, wait_s=30))
        while not (claimed := await queue.claim("w", max_runs=1, lease_s=60)):
            pass
        await queue.cancel([claimed[0].run_id])
        notice = await queue.wait("w", for_work=False, wait_s=30)
        assert notice == Notice(cancelled=(claimed[0].run_id,))
    assert await queue.wait("w", for_work=True, wait_s=0) == Notice()


async def test_lost_workers_are_noticed_on_every_shard(queue: RedisQueue):
    await queue.submit(runs(50), reply_to="gw")
    for one in await claim_all(queue, "dead"):
        await lapse(queue, "dead", one.run_id)
    assert await queue.reap() == 50
    assert {one.attempt for one in await claim_all(queue)} == {2}
    stats = await queue.stats()
    assert (stats.leased, stats.redelivered_total) == (50, 50)


async def test_a_worker_counts_once(queue: RedisQueue):
    await queue.announce("w", slots=5, ttl_s=60)
    stats = await queue.stats()
    assert (stats.workers, stats.slots) == (1, 5)
    await queue.retire("w")
    assert (await queue.stats()).workers == 0


@pytest.mark.parametrize("shards", [0, 65])
def test_a_queue_has_a_number_of_shards(shards: int):
    with pytest.raises(ValueError, match="1 to 64 shards"):
        RedisQueue.from_url("redis://127.0.0.1:1", shards=shards)


async def test_while_one_server_is_away_the_others_runs_go_on(tmp_path: Path):
    async with EmbeddedServer() as stays, EmbeddedServer(directory=tmp_path) as goes:
        queue = RedisQueue.from_url(f"{stays.url},{goes.url}", shards=2)
        await queue.submit(runs(40), reply_to="gw")
        claimed = await claim_all(queue)
        assert len(claimed) == 40
        os.kill(goes.pid, signal.SIGKILL)
        with pytest.raises(QueueUnavailable):
            await queue.ready()
        await queue.ping()
        with pytest.raises(QueueUnavailable):
            await queue.finish("w", [done(one) for one in claimed])
        kept = await queue.replies("gw", max_replies=100, wait_s=10)
        assert 0 < len(kept) < 40
        assert await queue.replies("gw", max_replies=100, wait_s=0.2) == []
        here = next(one for one in map(str, range(99)) if crc32(one.encode()) % 2 == 0)
        listening = asyncio.create_task(queue.wait("w", for_work=True, wait_s=30))
        await queue.submit([QueuedRun(here, b"")], reply_to="other")
        assert (await listening).work
        assert [one.run_id for one in await claim_all(queue)] == [here]
        await goes.stop()
        await goes.start()
        with pytest.raises(QueueUnavailable, match="is back"):
            while True:
                await queue.replies("gw", max_replies=100, wait_s=10)
        lost = [run for run in runs(40) if run.run_id not in {reply.run_id for reply in kept}]
        receipts = await queue.submit(lost, reply_to="gw")
        assert {receipt.state for receipt in receipts} == {"accepted"}
        assert len(await claim_all(queue)) == len(lost)
        await queue.close()


# A cluster


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisCluster]:
    async with redis_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


async def test_a_plain_url_of_a_cluster_says_what_to_write(cluster: RedisCluster):
    for node in cluster.primaries:
        queue = RedisQueue.from_url(node.url, shards=6)
        with pytest.raises(QueueUnavailable, match=r"redis\+cluster://"):
            await queue.ready()
        await queue.close()


async def test_a_queue_finds_its_slots_again_when_they_have_moved(cluster: RedisCluster):
    queue = RedisQueue.from_url(cluster.url, name="moves", shards=6)
    await queue.submit(runs(60), reply_to="gw")
    reading = asyncio.create_task(queue.replies("gw", max_replies=100, wait_s=30))
    await queue.stats()
    await cluster.fail_over()
    # Nobody was down: what comes to the old place is sent on, without an error.
    claimed = await claim_all(queue)
    assert len(claimed) == 60
    assert all(await queue.finish("w", [done(one) for one in claimed]))
    replies: list[Reply] = []
    async with asyncio.timeout(20):
        while len(replies) < 60:
            with contextlib.suppress(QueueUnavailable):
                replies += await reading
            reading = asyncio.create_task(queue.replies("gw", max_replies=100, wait_s=1))
    await asyncio.gather(reading, return_exceptions=True)
    assert Counter(reply.run_id for reply in replies) == Counter(run.run_id for run in runs(60))
    await queue.close()


def slot_of(queue: str, shard: int) -> int:
    return key_slot(f"{queue}:{shard}".encode())


async def test_slots_that_are_moved_key_by_key_under_load_lose_nothing(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollyard_queue.moving.MOVE_WAIT_S", 60.0)  # however slow the machine is

    def make() -> RedisQueue:
        return RedisQueue.from_url(cluster.url, name="carried", shards=6)

    async with Traffic(make) as traffic:
        for shard in range(6):
            await traffic.send(100)
            move = await cluster.begin_to_move(slot_of("carried", shard))
            sending = asyncio.create_task(traffic.send(100))
            moved = 0
            while await move.move_a_key():
                moved += 1
                await asyncio.sleep(0)
            await move.end()
            await sending
            assert moved >= 3  # what stays where nothing is left to do: counts, results, replies
        await traffic.all_answered()
    assert traffic.answers == Counter({f"run-{number}": 1 for number in range(1200)})
    assert traffic.wrong == []
    assert traffic.outages == 0  # nobody heard of it


async def test_no_script_runs_half_in_a_slot_that_moves(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
):
    """Where all keys that a script names are there, the server lets it begin."""
    queue = RedisQueue.from_url(cluster.url, name="half")
    await queue.submit([QueuedRun("a", b"1"), QueuedRun("b", b"1")], reply_to="gw")
    for _ in range(2):  # of three attempts: the last one is on probation
        for one in await claim_all(queue, "lost"):
            await lapse(queue, "lost", one.run_id)
        await queue.reap()
    await queue.announce("w", slots=1, ttl_s=600)
    late = [QueuedRun(run_id, b"1", expires_in_ms=600_000) for run_id in "cde"]
    await queue.submit(late, reply_to="gw")
    held = await queue.claim("w", max_runs=2, lease_s=600)
    keys = {key.removeprefix(b"{half:0}:").decode() for key in await cluster.keys()}
    assert keys.issuperset(set(KEYS) - {"absent"})
    before = await queue.stats()
    move = await cluster.begin_to_move(slot_of("half", 0))
    monkeypatch.setattr("rollyard_queue.moving.MOVE_WAIT_S", 0.2)
    # The first run of a job makes a key, after others have been written; so does a result.
    new = [QueuedRun("new", b"1", job="new")]
    for call in (queue.submit(new, reply_to="gw"), queue.finish("w", [done(one) for one in held])):
        with pytest.raises(QueueUnavailable, match="is being moved"):
            await call
    await move.give_up()
    stats = await queue.stats()
    assert (stats.queued, stats.leased) == (before.queued, before.leased) == (3, 2)
    [receipt] = await queue.submit(new, reply_to="gw")
    assert receipt.state == "accepted"
    assert await queue.finish("w", [done(one) for one in held]) == [True, True]
    assert len(await read(queue, 2)) == 2
    await queue.close()


async def test_calls_wait_for_a_slot_that_moves(cluster: RedisCluster):
    queue = RedisQueue.from_url(cluster.url, name="waits")
    await queue.submit(runs(3), reply_to="gw")
    [first, *_] = await claim_all(queue)
    move = await cluster.begin_to_move(slot_of("waits", 0))
    finishing = asyncio.create_task(queue.finish("w", [done(first)]))
    reading = asyncio.create_task(queue.replies("gw", max_replies=9, wait_s=60))
    assert await move.move_a_key()
    listening = asyncio.create_task(queue.wait("idle", for_work=False, wait_s=60))
    await move.end()
    assert await finishing == [True]
    assert await reading == [Reply("r0", b"result")]
    await queue.release("w", ["r1", "r2"])
    [other] = await queue.claim("idle", max_runs=1, lease_s=60)
    await queue.cancel([other.run_id])
    assert await listening == Notice(cancelled=(other.run_id,))
    await queue.close()


async def test_a_slot_that_stays_on_its_way_holds_up_no_other_shard(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollyard_queue.moving.MOVE_WAIT_S", 30.0)  # what follows is over by then
    queue = RedisQueue.from_url(cluster.url, name="stays", shards=2)
    await queue.submit(runs(80), reply_to="gw")
    held = await claim_all(queue)
    await queue.release("w", [one.run_id for one in held[::2]])
    held = held[1::2]
    [here, there] = [[one for one in held if queue.part_of(one.run_id) == part] for part in (0, 1)]
    assert here
    assert there
    assert (await queue.wait("w", for_work=True, wait_s=0)).work  # on both
    move = await cluster.begin_to_move(slot_of("stays", 1))
    assert await move.move_a_key()
    refused = await move.refusals()
    stuck = asyncio.create_task(queue.finish("w", [done(one) for one in there]))
    while await move.refusals() == refused:
        await asyncio.sleep(0)
    ids = [one.run_id for one in here]
    for _ in range(4):
        claimed = await queue.claim("w", max_runs=3, lease_s=600)
        assert claimed
        assert {queue.part_of(one.run_id) for one in claimed} == {0}
        assert await queue.renew("w", ids, lease_s=600) == []
        # Of both it must say that one is missing, while there is time for the next renewal.
        with pytest.raises(QueueUnavailable, match="shard 1"):
            await queue.renew("w", [one.run_id for one in held], lease_s=1)
    assert await queue.renew("w", ids, lease_s=600) == []
    assert not stuck.done()
    await move.end()
    assert await stuck == [True] * len(there)
    # It said before its move that it has work: it is asked first, though it is the other's turn.
    [next_one] = await queue.claim("w", max_runs=1, lease_s=600)
    assert queue.part_of(next_one.run_id) == 1
    await queue.close()


async def test_a_claim_with_nothing_in_hand_waits_for_a_slot_that_moves(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
):
    queue = RedisQueue.from_url(cluster.url, name="hungry", shards=2)
    there = [run for run in runs(20) if queue.part_of(run.run_id) == 1][:4]
    await queue.submit(there, reply_to="gw")
    assert (await queue.wait("w", for_work=True, wait_s=0)).work
    monkeypatch.setattr("rollyard_queue.moving.MOVE_WAIT_S", 60.0)
    move = await cluster.begin_to_move(slot_of("hungry", 1))
    refused = await move.refusals()
    claiming = asyncio.create_task(queue.claim("w", max_runs=2, lease_s=60))
    while await move.refusals() < refused + 3:
        await asyncio.sleep(0)
    await move.end()
    assert [one.run_id for one in await claiming] == [run.run_id for run in there[:2]]
    # Where the end is not to be seen, one shard that answers is enough for an answer.
    monkeypatch.setattr("rollyard_queue.moving.MOVE_WAIT_S", 0.0)
    moves = [await cluster.begin_to_move(slot_of("hungry", 1))]
    assert await claim_all(queue) == []
    moves.append(await cluster.begin_to_move(slot_of("hungry", 0)))
    with pytest.raises(QueueUnavailable, match="is being moved"):
        await claim_all(queue)
    for move in moves:
        await move.give_up()
    assert len(await claim_all(queue)) == 2
    await queue.close()


async def test_only_the_first_calls_wait_for_a_slot_that_stays_on_its_way(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollyard_queue.moving.MOVE_WAIT_S", 0.2)
    queue = RedisQueue.from_url(cluster.url, name="once")
    await queue.submit(runs(3), reply_to="gw")
    move = await cluster.begin_to_move(slot_of("once", 0))
    refused = [await move.refusals()]
    for _ in range(3):
        with pytest.raises(QueueUnavailable, match="is being moved"):
            await queue.stats()
        refused.append(await move.refusals())
        await queue.ping()  # is answered all the same, and proves nothing
    tries = [after - before for before, after in itertools.pairwise(refused)]
    assert tries[0] > 1
    assert tries[1:] == [1, 1]
    await move.give_up()
    assert (await queue.stats()).queued == 3
    # That move is over: the next one is waited for.
    move = await cluster.begin_to_move(slot_of("once", 0))
    before = await move.refusals()
    with pytest.raises(QueueUnavailable, match="is being moved"):
        await queue.stats()
    assert await move.refusals() > before + 1
    await move.end()
    assert (await queue.stats()).queued == 3
    await queue.close()


async def test_a_shard_that_stays_on_its_way_is_not_said_to_be_back(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollyard_queue.moving.MOVE_WAIT_S", 0.0)
    queue = RedisQueue.from_url(cluster.url, name="reads", shards=2)
    await queue.submit(runs(20), reply_to="gw")
    claimed = await claim_all(queue)
    parts = [[one for one in claimed if queue.part_of(one.run_id) == part] for part in (0, 1)]
    move = await cluster.begin_to_move(slot_of("reads", 1))
    refused = await move.refusals()
    for one in parts[0]:
        await queue.finish("w", [done(one)])
        [reply] = await queue.replies("gw", max_replies=9, wait_s=30)
        assert reply.run_id == one.run_id
    while await move.refusals() < refused + 4:  # it is looked at, again and again
        assert await queue.replies("gw", max_replies=9, wait_s=0) == []
    await move.end()
    with pytest.raises(QueueUnavailable, match="shard 1 of the queue was away, and is back"):
        while True:
            await queue.replies("gw", max_replies=9, wait_s=30)
    assert all(await queue.finish("w", [done(one) for one in parts[1]]))
    assert len(await read(queue, len(parts[1]))) == len(parts[1])
    await queue.close()


async def test_a_cluster_loses_a_primary_and_no_run(cluster: RedisCluster):
    def make() -> RedisQueue:
        return RedisQueue.from_url(cluster.url, name="loses", shards=6)

    async with Traffic(make) as traffic:
        for _ in range(10):
            await traffic.send(100)
        await traffic.all_answered()
        assert len([key for key in await cluster.keys() if b"loses:" in key]) > 6
        await traffic.send(300)
        await (await cluster.primary_with_a_replica()).kill()
        for _ in range(10):
            await traffic.send(50)
        await traffic.all_answered()
    assert traffic.answers == Counter({f"run-{number}": 1 for number in range(1800)})
    assert traffic.wrong == []
    assert traffic.outages > 0


# A sentinel


@pytest.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WatchedPair]:
    async with watched_pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


async def test_a_promoted_replica_takes_over(pair: WatchedPair):
    async with Traffic(lambda: RedisQueue.from_url(pair.url, shards=2)) as traffic:
        for _ in range(5):
            await traffic.send(100)
        await traffic.all_answered()
        await traffic.send(300)
        await pair.primary.kill()
        for _ in range(5):
            await traffic.send(50)
        await traffic.all_answered()
    assert traffic.answers == Counter({f"run-{number}": 1 for number in range(1050)})
    assert traffic.wrong == []
    assert traffic.outages > 0
    assert b"role:master" in cast("bytes", await pair.replica.ask("INFO", "replication"))


async def test_a_sentinel_that_knows_no_such_primary_is_said(pair: WatchedPair):
    queue = RedisQueue.from_url(pair.url.replace("watched", "other"))
    with pytest.raises(QueueUnavailable, match="knows no primary named 'other'"):
        await queue.ready()
    await queue.close()


# An embedded server that is restarted


async def test_a_restart_under_load_answers_every_run_once(tmp_path: Path):
    server = EmbeddedServer(directory=tmp_path)
    async with server, Traffic(lambda: RedisQueue.from_url(server.url)) as traffic:
        for restart in range(3):
            await traffic.send(300)
            os.kill(server.pid, signal.SIGKILL if restart else signal.SIGTERM)
            await server.stop()
            sending = asyncio.create_task(traffic.send(50))
            await server.start()
            await sending
        await traffic.all_answered()
    assert traffic.answers == Counter({f"run-{number}": 1 for number in range(1050)})
    assert traffic.wrong == []
    assert traffic.outages > 0


# URLs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host", "scheme"),
        ("redis+cluster://", "host is missing"),
        ("redis+cluster://a,,b", "host is missing"),
        ("redis+cluster://a:1/2", "database 0 alone"),
        ("redis+sentinel://a:1,b:2", "name of the primary is missing"),
        ("redis+other://a", "scheme"),
    ],
)
def test_a_malformed_url_is_said(url: str, message: str):
    with pytest.raises(ValueError, match=message):
        RedisQueue.from_url(url)
