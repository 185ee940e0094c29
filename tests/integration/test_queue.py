"""Each promise of rollyard_queue.base, against the real server."""

import asyncio
import contextlib
import itertools
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
from queue_server import Keys, lapse, outcome, until_ms_passed

from rollyard.types import RunResult
from rollyard_queue.base import QueueFull, RunIdTaken
from rollyard_queue.connections import Server
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import Delivery, FinishedRun, Notice, QueuedRun, Reply
from rollyard_queue.redis import RedisQueue

MakeQueue = Callable[..., RedisQueue]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def embedded() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as server:
        yield server


@pytest.fixture
async def server(embedded: EmbeddedServer) -> AsyncIterator[Server]:
    server = Server.from_url(embedded.url)
    yield server
    await server.close()


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def keys(server: Server, name: str) -> Keys:
    return Keys(server, name)


@pytest.fixture
async def make_queue(embedded: EmbeddedServer, name: str) -> AsyncIterator[MakeQueue]:
    made: list[RedisQueue] = []

    def make(**options: object) -> RedisQueue:
        make_one = cast("Callable[..., RedisQueue]", RedisQueue.from_url)
        made.append(make_one(embedded.url, name=name, **options))
        return made[-1]

    yield make
    for queue in made:
        await queue.close()


@pytest.fixture
def queue(make_queue: MakeQueue) -> RedisQueue:
    return make_queue()


def run(run_id: str, payload: bytes = b"{}", **options: object) -> QueuedRun:
    return cast("Callable[..., QueuedRun]", QueuedRun)(run_id, payload, **options)


def runs(count: int) -> list[QueuedRun]:
    return [run(f"r{number}") for number in range(count)]


def done(delivery: Delivery, result: bytes = b'{"outcome":"ok"}') -> FinishedRun:
    return FinishedRun(delivery.run_id, delivery.attempt, result)


async def read(queue: RedisQueue, reply_to: str = "gw", wait_s: float = 0) -> list[Reply]:
    return await queue.replies(reply_to, max_replies=1024, wait_s=wait_s)


async def claim(queue: RedisQueue, worker: str = "w", count: int = 1024) -> list[Delivery]:
    return await queue.claim(worker, max_runs=count, lease_s=60)


async def claim_one(queue: RedisQueue, worker: str = "w") -> Delivery:
    [delivery] = await claim(queue, worker, 1)
    return delivery


# The way of a run


async def test_a_run_goes_through_and_leaves_only_what_expires(queue: RedisQueue, keys: Keys):
    [receipt] = await queue.submit([run("a", b'{"code":"1"}')], reply_to="gw")
    assert (receipt.run_id, receipt.state, receipt.result) == ("a", "accepted", None)
    delivery = await claim_one(queue)
    assert (delivery.run_id, delivery.payload, delivery.attempt) == ("a", b'{"code":"1"}', 1)
    assert 0 <= delivery.queued_ms < 60_000
    assert await queue.finish("w", [done(delivery, b"result")]) == [True]
    assert await read(queue) == [Reply("a", b"result")]
    assert await keys.lasting() == set()


async def test_a_result_stays_for_late_duplicates_and_then_goes(
    make_queue: MakeQueue, keys: Keys, server: Server, name: str
):
    queue = make_queue(result_ttl_s=600)
    await queue.submit([run("a")], reply_to="gw")
    await queue.finish("w", [done(await claim_one(queue), b"result")])
    assert not await keys.holds_payload("a")
    [receipt] = await queue.submit([run("a")], reply_to="other")
    assert (receipt.state, receipt.result) == ("done", b"result")
    [kept] = [key for key in await keys.all() if key.startswith("done:")]
    assert 600_000 < await keys.ttl_ms(kept) <= 1_200_000
    await server.command("DEL", f"{{{name}:0}}:{kept}")
    [receipt] = await queue.submit([run("a")], reply_to="gw")
    assert receipt.state == "accepted"


@pytest.mark.parametrize(("periods", "state"), [(1, "done"), (2, "done"), (3, "accepted")])
async def test_a_result_is_found_until_its_time_is_over(
    make_queue: MakeQueue, keys: Keys, server: Server, name: str, periods: int, state: str
):
    queue = make_queue(result_ttl_s=2 * 86400)  # kept by periods of half of it, a day
    await queue.submit([run("a")], reply_to="gw")
    await queue.finish("w", [done(await claim_one(queue), b"result")])
    [kept] = [key for key in await keys.all() if key.startswith("done:")]
    older = f"done:{int(kept.removeprefix('done:')) - periods}"
    await server.command("RENAME", f"{{{name}:0}}:{kept}", f"{{{name}:0}}:{older}")
    [receipt] = await queue.submit([run("a")], reply_to="gw")
    assert receipt.state == state


async def test_bytes_pass_unchanged(queue: RedisQueue):
    payload, result = bytes(range(256)) * 300, bytes(reversed(range(256))) * 500
    await queue.submit([run("a", payload)], reply_to="gw")
    delivery = await claim_one(queue)
    assert delivery.payload == payload
    await queue.finish("w", [done(delivery, result)])
    assert await read(queue) == [Reply("a", result)]


async def test_a_whole_batch_and_nothing_at_all(queue: RedisQueue):
    assert await queue.submit([], reply_to="gw") == []
    receipts = await queue.submit(runs(1024), reply_to="gw")
    assert {receipt.state for receipt in receipts} == {"accepted"}
    with pytest.raises(ValueError, match="1024"):
        await queue.submit(runs(1025), reply_to="gw")
    deliveries = await claim(queue)
    assert [delivery.run_id for delivery in deliveries] == [f"r{n}" for n in range(1024)]
    assert await claim(queue) == []
    assert await queue.claim("w", max_runs=0, lease_s=1) == []
    assert all(await queue.finish("w", [done(delivery) for delivery in deliveries]))
    assert len(await read(queue)) == 1024


@pytest.mark.parametrize("reply_to", ["", "two\nlines"])
async def test_a_reply_list_has_a_plain_name(queue: RedisQueue, reply_to: str):
    with pytest.raises(ValueError, match="reply_to"):
        await queue.submit([run("a")], reply_to=reply_to)


@pytest.mark.parametrize("bad", ["", "{", "a}b"])
def test_a_queue_has_a_plain_name(bad: str):
    with pytest.raises(ValueError, match="queue name"):
        RedisQueue.from_url("redis://127.0.0.1:1", name=bad)


# Duplicates


async def test_gateways_that_wait_for_one_run_each_get_it_once(queue: RedisQueue):
    receipts = await queue.submit([run("a"), run("a")], reply_to="one")
    receipts += await queue.submit([run("a")], reply_to="two")
    delivery = await claim_one(queue)
    receipts += await queue.submit([run("a")], reply_to="three")
    receipts += await queue.submit([run("a")], reply_to="two")
    states = [receipt.state for receipt in receipts]
    assert states == ["accepted", "joined", "joined", "joined", "joined"]
    assert await claim(queue) == []
    assert await queue.finish("w", [done(delivery, b"result")]) == [True]
    for gateway in ("one", "two", "three"):
        assert await read(queue, gateway) == [Reply("a", b"result")]
        assert await read(queue, gateway) == []


async def test_of_two_results_one_counts(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    delivery = await claim_one(queue)
    both = [queue.finish("w", [done(delivery, result)]) for result in (b"1", b"2")]
    assert sorted(await asyncio.gather(*both)) == [[False], [True]]
    assert await queue.finish("w", [done(delivery), done(delivery)]) == [False, False]
    assert len(await read(queue)) == 1


async def test_of_two_results_in_one_call_the_first_counts(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    delivery = await claim_one(queue)
    assert await queue.finish("w", [done(delivery, b"1"), done(delivery, b"2")]) == [True, False]
    assert await read(queue) == [Reply("a", b"1")]
    assert (await queue.stats()).finished_total == 1


async def test_finish_is_fenced_by_owner_and_attempt(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    delivery = await claim_one(queue, "owner")
    assert await queue.finish("thief", [done(delivery)]) == [False]
    assert await queue.finish("owner", [FinishedRun("a", 2, b"")]) == [False]
    assert await queue.finish("owner", [FinishedRun("unknown", 1, b"")]) == [False]
    assert await queue.finish("owner", [done(delivery)]) == [True]


# Admission


async def test_a_batch_that_does_not_fit_is_refused_whole(make_queue: MakeQueue):
    queue = make_queue(max_queued=10)
    await queue.submit(runs(8), reply_to="gw")
    with pytest.raises(QueueFull, match="8 runs") as refused:
        await queue.submit([run("x"), run("y"), run("z")], reply_to="gw")
    assert 0.1 <= refused.value.retry_after_s <= 30
    assert (await queue.stats()).queued == 8
    # What joins takes no room, so it is never refused.
    receipts = await queue.submit([run("r0"), run("x"), run("y")], reply_to="gw")
    assert [receipt.state for receipt in receipts] == ["joined", "accepted", "accepted"]
    await queue.submit([run("r0")], reply_to="gw")
    assert len(await claim(queue, count=3)) == 3
    await queue.submit([run("p"), run("q"), run("s")], reply_to="gw")


async def test_bytes_are_bounded_too(make_queue: MakeQueue):
    queue = make_queue(max_queued_bytes=1000)
    await queue.submit([run("a", b"x" * 900)], reply_to="gw")
    with pytest.raises(QueueFull, match="900 bytes"):
        await queue.submit([run("b", b"x" * 101)], reply_to="gw")
    await queue.submit([run("b", b"x" * 100)], reply_to="gw")
    assert (await queue.stats()).queued_bytes == 1000
    await claim(queue)
    assert (await queue.stats()).queued_bytes == 0


async def test_the_wait_follows_the_rate_at_which_the_queue_drains(make_queue: MakeQueue):
    queue = make_queue(max_queued=100)
    for batch in range(20):
        await queue.submit([run(f"{batch}-{n}") for n in range(100)], reply_to="gw")
        await claim(queue)
    await queue.submit(runs(100), reply_to="gw")
    # 2,000 in the last seconds: one more takes no time, a hundred more a part of a second.
    with pytest.raises(QueueFull) as one_more:
        await queue.submit([run("one")], reply_to="gw")
    assert one_more.value.retry_after_s == pytest.approx(0.1)
    with pytest.raises(QueueFull) as many_more:
        await queue.submit([run(f"m{n}") for n in range(1000)], reply_to="gw")
    assert 1 < many_more.value.retry_after_s <= 30


async def test_nobody_waits_long_for_a_rate_that_was_hardly_seen(make_queue: MakeQueue):
    queue = make_queue(max_queued=1000)
    await queue.submit(runs(1000), reply_to="gw")
    await queue.claim("w", max_runs=1, lease_s=60)  # one in seconds, as far as one can tell
    with pytest.raises(QueueFull) as refused:
        await queue.submit([run(f"m{n}") for n in range(1000)], reply_to="gw")
    assert 0.1 <= refused.value.retry_after_s <= 2


async def test_a_rate_that_was_seen_for_long_is_believed(
    make_queue: MakeQueue, server: Server, name: str
):
    queue = make_queue(max_queued=1000)
    await queue.submit(runs(1000), reply_to="gw")
    await queue.claim("w", max_runs=10, lease_s=60)
    key = f"{{{name}:0}}:load"
    since = int(cast("bytes", await server.command("HGET", key, "since")))
    await server.command("HSET", key, "since", since - 60_000_000)  # a minute of work
    with pytest.raises(QueueFull) as refused:
        await queue.submit([run(f"m{n}") for n in range(1000)], reply_to="gw")
    assert refused.value.retry_after_s == 30


# What an id stands for


@pytest.mark.parametrize("state", ["queued", "running", "done", "cancelled", "redelivered"])
async def test_an_id_stands_for_one_content(queue: RedisQueue, state: str):
    mine, unknown = run("a", digest=b"content1"), run("a")
    other = run("a", digest=b"content2")
    await queue.submit([mine], reply_to="gw")
    if state == "cancelled":
        await queue.cancel(["a"])
    elif state != "queued":
        delivery = await claim_one(queue)
        if state == "redelivered":
            await lapse(queue, "w", "a")
            assert await queue.reap() == 1
        elif state == "done":
            await queue.finish("w", [done(delivery, b"+ as it is")])
    with pytest.raises(RunIdTaken, match="'a'") as refused:
        await queue.submit([run("b"), other], reply_to="other")
    assert refused.value.run_ids == ("a",)
    met = "done" if state in ("done", "cancelled") else "joined"
    for same in (mine, unknown):
        [receipt] = await queue.submit([same], reply_to="other")
        assert receipt.state == met
        assert receipt.result == (b"+ as it is" if state == "done" else receipt.result)
    assert await queue.cancel(["b"]) == ["unknown"]


async def test_within_a_batch_too(queue: RedisQueue):
    batch = [run("a", digest=b"content1"), run("a", digest=b"content2")]
    with pytest.raises(RunIdTaken):
        await queue.submit(batch, reply_to="gw")
    assert (await queue.stats()).queued == 0
    receipts = await queue.submit([batch[0], run("a"), batch[0]], reply_to="gw")
    assert [receipt.state for receipt in receipts] == ["accepted", "joined", "joined"]


@pytest.mark.parametrize("result", [b'{"outcome":"ok"}', b"+not a digest", b"Do as it says"])
async def test_an_older_gateways_run_is_any_content(queue: RedisQueue, result: bytes):
    await queue.submit([run("a"), run("b")], reply_to="gw")
    await queue.finish("w", [done(await claim_one(queue), result)])
    for run_id, state in (("a", "done"), ("b", "joined")):
        [receipt] = await queue.submit([run(run_id, digest=b"content2")], reply_to="gw")
        assert receipt.state == state
        assert receipt.result == (result if state == "done" else None)


async def test_an_abandoned_id_is_free_for_another_content(queue: RedisQueue):
    await queue.submit([run("a", digest=b"content1")], reply_to="gw")
    await queue.cancel(["a"], abandon_by="gw")
    [receipt] = await queue.submit([run("a", digest=b"content2")], reply_to="gw")
    assert receipt.state == "accepted"


# Order


async def test_the_oldest_goes_first(queue: RedisQueue):
    for run_id in "abc":
        await queue.submit([run(run_id + "2"), run(run_id + "1")], reply_to="gw")
    ids = [(await claim_one(queue)).run_id for _ in range(3)]
    ids += [delivery.run_id for delivery in await claim(queue)]
    assert ids == ["a2", "a1", "b2", "b1", "c2", "c1"]


async def test_jobs_take_turns(queue: RedisQueue):
    await queue.submit([run(f"big{n}", job="big") for n in range(100)], reply_to="gw")
    await queue.submit([run(f"small{n}", job="small") for n in range(3)], reply_to="gw")
    by_one = [(await claim_one(queue)).run_id for _ in range(4)]
    assert by_one == ["big0", "small0", "big1", "small1"]
    together = [delivery.run_id for delivery in await claim(queue, count=10)]
    assert "small2" in together
    assert len(together) == 10


async def test_within_a_job_priority_goes_first_and_then_the_deadline(queue: RedisQueue):
    await queue.submit([run("plain"), run("low", priority=-1)], reply_to="gw")
    await queue.submit(
        [
            run("later", expires_in_ms=60_000),
            run("soon", expires_in_ms=30_000),
            run("high", priority=100),
            run("high and soon", priority=100, expires_in_ms=80_000_000),
        ],
        reply_to="gw",
    )
    ids = [delivery.run_id for delivery in await claim(queue)]
    assert ids == ["high and soon", "high", "soon", "later", "plain", "low"]


async def test_a_priority_does_not_pass_other_jobs(queue: RedisQueue):
    await queue.submit([run(f"a{n}", job="a", priority=9) for n in range(4)], reply_to="gw")
    await queue.submit([run(f"b{n}", job="b", priority=-9) for n in range(4)], reply_to="gw")
    assert [(await claim_one(queue)).run_id for _ in range(4)] == ["a0", "b0", "a1", "b1"]


async def test_a_job_at_its_cap_of_running_runs_is_passed_over(make_queue: MakeQueue):
    queue = make_queue(max_running_per_job=2)
    await queue.submit([run(f"a{n}", job="a") for n in range(5)], reply_to="gw")
    await queue.submit([run(f"b{n}", job="b") for n in range(2)], reply_to="gw")
    claimed = await claim(queue)
    assert sorted(one.run_id for one in claimed) == ["a0", "a1", "b0", "b1"]
    assert await claim(queue, "other") == []
    while (await queue.wait("other", for_work=True, wait_s=0)).work:
        assert await claim(queue, "other") == []  # tokens of the submission
    # The end of one makes room for one, and says so.
    await queue.finish("w", [done(one) for one in claimed if one.run_id == "a0"])
    assert await queue.wait("other", for_work=True, wait_s=5) == Notice(work=True)
    assert [one.run_id for one in await claim(queue, "other")] == ["a2"]
    await queue.cancel(["a1"])
    assert [one.run_id for one in await claim(queue, "other")] == ["a3"]
    await lapse(queue, "other", "a2")
    assert await queue.reap() == 1
    assert [one.run_id for one in await claim(queue)] == ["a2"]


async def test_one_jobs_bounds_leave_room_for_others(make_queue: MakeQueue):
    queue = make_queue(max_queued_per_job=3, max_queued_bytes_per_job=100)
    await queue.submit([run(f"a{n}", job="a") for n in range(3)], reply_to="gw")
    with pytest.raises(QueueFull, match="job 'a' holds 3 runs") as full:
        await queue.submit([run("b0", job="b"), run("a3", job="a")], reply_to="gw")
    assert full.value.job == "a"
    assert 0.1 <= full.value.retry_after_s <= 30
    assert (await queue.stats()).queued == 3
    with pytest.raises(QueueFull, match="bytes of at most 100") as full:
        await queue.submit([run("b0", b"x" * 101, job="b")], reply_to="gw")
    assert full.value.job == "b"
    await queue.submit([run("b0", b"x" * 100, job="b"), run("a0", job="a")], reply_to="gw")
    await claim(queue)
    await queue.submit([run(f"a{n}", job="a") for n in range(3, 6)], reply_to="gw")


async def test_a_run_that_kills_workers_takes_no_other_to_its_end(
    make_queue: MakeQueue, keys: Keys
):
    """Twenty runs in flight on one worker, one of which kills it whenever it is there."""
    queue = make_queue(max_attempts=3)
    await queue.submit([run("poison"), *runs(20)], reply_to="gw")
    deaths = 0
    while (await queue.stats()).queued:
        held = await claim(queue, f"w{deaths}", 16)
        if "poison" in [one.run_id for one in held]:
            for one in held:
                await lapse(queue, f"w{deaths}", one.run_id)
            deaths += 1
            await queue.reap()
        else:
            assert all(await queue.finish(f"w{deaths}", [done(one) for one in held]))
    assert deaths == 3
    outcomes = {reply.run_id: outcome(reply.result) for reply in await read(queue)}
    assert outcomes == {one.run_id: "ok" for one in runs(20)} | {"poison": "infra_error"}
    assert await keys.lasting() == set()


async def test_a_worker_holds_one_run_on_probation_at_a_time(make_queue: MakeQueue):
    queue = make_queue(max_attempts=2)
    await queue.submit(runs(3), reply_to="gw")
    for one in await claim(queue, "dead"):
        await lapse(queue, "dead", one.run_id)
    assert await queue.reap() == 3
    first = await claim_one(queue, "w")
    assert await claim(queue, "w") == []
    assert [one.attempt for one in await claim(queue, "other")] == [2]
    assert await queue.finish("w", [done(first)]) == [True]
    assert [one.attempt for one in await claim(queue, "w")] == [2]


# Leases


async def test_a_lost_lease_gives_the_run_to_another_worker(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    first = await claim_one(queue, "dead")
    assert await queue.reap() == 0
    await lapse(queue, "dead", "a")
    assert await queue.reap() == 1
    second = await claim_one(queue, "alive")
    assert (second.run_id, second.attempt, second.payload) == ("a", 2, first.payload)
    assert await queue.renew("dead", ["a"], lease_s=60) == ["a"]
    assert await queue.finish("dead", [done(first, b"late")]) == [False]
    assert await queue.finish("alive", [done(second, b"result")]) == [True]
    assert await read(queue) == [Reply("a", b"result")]
    assert (await queue.stats()).redelivered_total == 1


async def test_a_slow_worker_is_told_that_its_run_was_given_away(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    await claim_one(queue, "slow")
    await lapse(queue, "slow", "a")
    waiting = asyncio.create_task(queue.wait("slow", for_work=False, wait_s=30))
    assert await queue.reap() == 1
    assert await waiting == Notice(cancelled=("a",))


async def test_a_tiny_lease_ends_by_the_servers_clock(queue: RedisQueue, server: Server):
    await queue.submit([run("a")], reply_to="gw")
    await queue.claim("w", max_runs=1, lease_s=0.002)
    await until_ms_passed(server, 3)
    assert await queue.reap() == 1


async def test_renewal_keeps_a_run(queue: RedisQueue):
    await queue.submit([run("a"), run("b")], reply_to="gw")
    await queue.claim("w", max_runs=2, lease_s=0)
    assert await queue.renew("w", ["a", "unknown"], lease_s=60) == ["unknown"]
    assert await queue.reap() == 1
    assert [delivery.run_id for delivery in await claim(queue, "other")] == ["b"]


async def test_a_run_that_loses_its_workers_ends_with_infra_error(
    make_queue: MakeQueue, keys: Keys
):
    queue = make_queue(max_attempts=2)
    await queue.submit([run("poison")], reply_to="gw")
    for attempt in (1, 2):
        assert (await claim_one(queue, f"w{attempt}")).attempt == attempt
        await lapse(queue, f"w{attempt}", "poison")
        assert await queue.reap() == 1
    assert await claim(queue) == []
    [reply] = await read(queue)
    result = RunResult.model_validate_json(reply.result)
    assert (result.run_id, result.outcome, result.attempt) == ("poison", "infra_error", 2)
    assert result.worker_id == "w2"
    assert "2 workers were lost" in result.message
    assert result.model_fields_set == set(RunResult.model_fields)
    assert await keys.lasting() == set()


async def test_many_leases_are_reaped_at_once(queue: RedisQueue):
    await queue.submit(runs(700), reply_to="gw")
    await queue.claim("w", max_runs=700, lease_s=0)
    assert sum(await asyncio.gather(queue.reap(), queue.reap(), queue.reap())) == 700
    assert len(await claim(queue)) == 700


async def test_released_runs_go_to_the_front_and_are_not_counted(queue: RedisQueue):
    await queue.submit(runs(4), reply_to="gw")
    await claim(queue, "w", 2)
    assert await queue.release("other", ["r0"]) == 0
    assert await queue.release("w", ["r1", "r0", "r3", "unknown"]) == 2
    again = await claim(queue, "w")
    order = [(delivery.run_id, delivery.attempt) for delivery in again]
    assert order == [("r0", 1), ("r1", 1), ("r2", 1), ("r3", 1)]


async def test_a_killed_worker_loses_nothing(
    queue: RedisQueue, embedded: EmbeddedServer, name: str
):
    await queue.submit([run("a")], reply_to="gw")
    claimer = (
        "import asyncio, sys\n"
        "from rollyard_queue.redis import RedisQueue\n"
        "async def main():\n"
        "    queue = RedisQueue.from_url(sys.argv[1], name=sys.argv[2])\n"
        "    print(await queue.claim('killed', max_runs=1, lease_s=0.05), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", claimer, embedded.url, name), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert b"run_id='a'" in await process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    while await queue.reap() == 0:
        pass
    delivery = await claim_one(queue, "alive")
    assert delivery.attempt == 2
    assert await queue.finish("alive", [done(delivery, b"result")]) == [True]
    assert await read(queue) == [Reply("a", b"result")]


# Deadlines


@pytest.mark.parametrize("by", ["claim", "reap"])
async def test_a_run_past_its_deadline_is_answered_unrun(
    queue: RedisQueue, keys: Keys, server: Server, by: str
):
    await queue.submit(
        [run("a", expires_in_ms=1), run("b", expires_in_ms=60_000), run("c")], reply_to="gw"
    )
    await until_ms_passed(server, 2)
    if by == "reap":
        assert await queue.reap() == 1
    claimed = await claim(queue, count=2)
    assert [delivery.run_id for delivery in claimed] == ["b", "c"]
    [reply] = await read(queue)
    result = RunResult.model_validate_json(reply.result)
    assert (result.run_id, result.outcome) == ("a", "expired")
    assert result.queued_ms >= 1
    await queue.finish("w", [done(delivery) for delivery in claimed])
    assert await keys.lasting() == set()


async def test_a_run_that_comes_back_keeps_its_deadline(queue: RedisQueue, server: Server):
    await queue.submit([run(run_id, expires_in_ms=100) for run_id in "ab"], reply_to="gw")
    await queue.claim("w", max_runs=2, lease_s=0)
    assert await queue.release("w", ["b"]) == 1
    assert await queue.reap() == 1
    await until_ms_passed(server, 100)
    assert await queue.reap() == 2
    replies = await read(queue)
    assert {reply.run_id: outcome(reply.result) for reply in replies} == {
        "a": "expired",
        "b": "expired",
    }


# Cancelling


async def test_cancel_answers_the_state_it_met(queue: RedisQueue, keys: Keys):
    await queue.submit([run("finished"), run("running")], reply_to="gw")
    finished, _ = await claim(queue)
    await queue.finish("w", [done(finished)])
    await queue.submit([run("queued")], reply_to="gw")
    await queue.submit([run("queued")], reply_to="gw2")
    states = await queue.cancel(["queued", "running", "finished", "unknown", "queued"])
    assert states == ["queued", "running", "done", "unknown", "done"]
    results = {reply.run_id: reply.result for reply in await read(queue)}
    assert outcome(results["queued"]) == outcome(results["running"]) == "cancelled"
    assert outcome(results["finished"]) == "ok"
    RunResult.model_validate_json(results["running"])
    assert [reply.run_id for reply in await read(queue, "gw2")] == ["queued"]
    assert await claim(queue) == []
    assert await queue.finish("w", [FinishedRun("running", 1, b"late")]) == [False]
    [receipt] = await queue.submit([run("running")], reply_to="gw")
    assert receipt.state == "done"
    assert receipt.result == results["running"]
    assert await keys.lasting() == set()


async def test_the_worker_of_a_cancelled_run_is_told(queue: RedisQueue):
    await queue.submit([run("a"), run("b"), run("c")], reply_to="gw")
    await claim(queue)
    waiting = asyncio.create_task(queue.wait("w", for_work=False, wait_s=30))
    await queue.cancel(["a"])
    assert await waiting == Notice(cancelled=("a",))
    await queue.cancel(["b", "c"], abandon_by="gw")
    assert await queue.wait("w", for_work=True, wait_s=30) == Notice(cancelled=("b", "c"))
    assert await queue.renew("w", ["a", "b", "c"], lease_s=60) == ["a", "b", "c"]


async def test_an_abandoned_run_goes_on_for_others(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="one")
    await queue.submit([run("a")], reply_to="two")
    assert await queue.cancel(["a"], abandon_by="stranger") == ["queued"]
    assert await queue.cancel(["a"], abandon_by="one") == ["queued"]
    delivery = await claim_one(queue)
    await queue.finish("w", [done(delivery, b"result")])
    assert await read(queue, "one") == []
    assert await read(queue, "two") == [Reply("a", b"result")]


async def test_a_run_that_all_abandon_leaves_no_result_and_runs_anew(queue: RedisQueue, keys: Keys):
    await queue.submit([run(one, expires_in_ms=60_000) for one in "ab"], reply_to="gw")
    first = await claim_one(queue)
    assert await queue.cancel(["a", "b"], abandon_by="gw") == ["running", "queued"]
    assert await queue.cancel(["a", "b"], abandon_by="gw") == ["unknown", "unknown"]
    assert await keys.lasting() == set()
    assert await read(queue) == []
    [receipt] = await queue.submit([run("a", b"anew")], reply_to="gw")
    assert receipt.state == "accepted"
    second = await claim_one(queue)
    assert second.payload == b"anew"
    # The same worker may still be ending the first life: its report must not count.
    assert await queue.finish("w", [done(first, b"cancelled")]) == [False]
    assert await queue.finish("w", [done(second, b"result")]) == [True]
    assert await read(queue) == [Reply("a", b"result")]


async def test_a_notice_about_an_earlier_life_is_not_taken_for_this_one(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    await claim_one(queue)
    await queue.cancel(["a"], abandon_by="gw")
    await queue.submit([run("a")], reply_to="gw")
    await claim_one(queue)
    assert await queue.wait("w", for_work=False, wait_s=0) == Notice()


async def test_an_abandoned_life_does_not_use_up_attempts(make_queue: MakeQueue):
    queue = make_queue(max_attempts=1)
    for _ in range(3):
        await queue.submit([run("a")], reply_to="gw")
        await claim_one(queue)
        await queue.cancel(["a"], abandon_by="gw")
    await queue.submit([run("a")], reply_to="gw")
    assert (await claim_one(queue)).attempt == 4
    await lapse(queue, "w", "a")
    assert await queue.reap() == 1
    [reply] = await read(queue)
    assert "1 worker was lost" in RunResult.model_validate_json(reply.result).message


# Waking


async def test_an_idle_worker_wakes_at_once(queue: RedisQueue):
    waiting = asyncio.create_task(queue.wait("w", for_work=True, wait_s=30))
    await asyncio.sleep(0)
    await queue.submit([run("a")], reply_to="gw")
    began = time.monotonic()
    assert await waiting == Notice(work=True)
    assert time.monotonic() - began < 1  # measured: under 1 ms; the machine may be busy


async def test_a_wait_ends(queue: RedisQueue):
    assert await queue.wait("w", for_work=True, wait_s=0) == Notice()
    await queue.submit([run("a")], reply_to="gw")
    assert await queue.wait("w", for_work=False, wait_s=0.01) == Notice()


async def test_every_idle_worker_is_woken_while_work_is_left(make_queue: MakeQueue):
    queue = make_queue()

    async def work_once(number: int) -> str:
        while True:
            notice = await queue.wait(f"w{number}", for_work=True, wait_s=30)
            assert notice.work
            for delivery in await claim(queue, f"w{number}", 1):
                return delivery.run_id

    workers = [asyncio.create_task(work_once(number)) for number in range(20)]
    await queue.submit(runs(20), reply_to="gw")
    taken = await asyncio.wait_for(asyncio.gather(*workers), 20)
    assert sorted(taken) == sorted(one.run_id for one in runs(20))


async def test_a_claim_that_leaves_work_wakes_another_worker(queue: RedisQueue, keys: Keys):
    await queue.submit(runs(10), reply_to="gw")
    while (await queue.wait("x", for_work=True, wait_s=0)).work:
        pass
    await claim(queue, count=9)
    assert await queue.wait("x", for_work=True, wait_s=0) == Notice(work=True)
    await claim(queue)
    assert "wake" not in await keys.all()


async def test_one_run_wakes_one_worker(queue: RedisQueue):
    waits = [asyncio.create_task(queue.wait(f"w{n}", for_work=True, wait_s=0.5)) for n in range(5)]
    await queue.submit([run("a")], reply_to="gw")
    notices = await asyncio.gather(*waits)
    assert Counter(notice.work for notice in notices) == {True: 1, False: 4}


async def test_a_wake_that_died_with_its_taker_is_repaired(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    assert await queue.wait("dies", for_work=True, wait_s=1) == Notice(work=True)
    assert await queue.wait("w", for_work=True, wait_s=0) == Notice()
    await queue.reap()
    assert await queue.wait("w", for_work=True, wait_s=1) == Notice(work=True)
    await queue.retire("w")
    assert await queue.wait("x", for_work=True, wait_s=1) == Notice(work=True)


async def test_no_wake_is_left_when_the_queue_is_empty(queue: RedisQueue, keys: Keys):
    await queue.submit(runs(10), reply_to="gw")
    await queue.cancel([one.run_id for one in runs(10)])
    assert "wake" not in await keys.all()


async def interrupted(queue: RedisQueue, worker: str, *, for_work: bool) -> None:
    """A wait that its caller cancels once the server has it."""
    waiting = asyncio.create_task(queue.wait(worker, for_work=for_work, wait_s=30))
    await asyncio.sleep(0)
    await queue.ping()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_interrupted_wait_loses_nothing(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    await claim_one(queue)
    await interrupted(queue, "w", for_work=True)
    await queue.cancel(["a"])
    await queue.submit([run("b")], reply_to="gw")
    first = await queue.wait("w", for_work=True, wait_s=30)
    second = await queue.wait("w", for_work=True, wait_s=30) if not first.work else Notice()
    assert first.work or second.work
    assert first.cancelled + second.cancelled == ("a",)


async def test_a_wake_for_a_worker_that_is_full_by_now_goes_to_another(
    make_queue: MakeQueue, keys: Keys
):
    queue = make_queue()
    await interrupted(queue, "full", for_work=True)
    busy = asyncio.create_task(queue.wait("full", for_work=False, wait_s=30))
    await asyncio.sleep(0)
    # The token finds the worker that has listened longest, and that has no room any more.
    idle = asyncio.create_task(make_queue().wait("idle", for_work=True, wait_s=30))
    await queue.submit([run("a")], reply_to="gw")
    assert await asyncio.wait_for(idle, 10) == Notice(work=True)
    await queue.cancel(["a"])
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    # Without work there is nothing to pass on, and nothing left over.
    await interrupted(queue, "full", for_work=True)
    await queue.submit([run("b")], reply_to="gw")
    await queue.cancel(["b"])
    await queue.retire("full")
    assert "wake" not in await keys.all()


async def test_interrupting_costs_no_connection(queue: RedisQueue, server: Server):
    async def connections() -> int:
        return len(cast("bytes", await server.command("CLIENT", "LIST")).splitlines())

    await interrupted(queue, "w", for_work=True)
    before = await connections()
    for number in range(20):
        await interrupted(queue, "w", for_work=number % 2 == 0)
    assert await connections() == before
    await queue.retire("w")
    while await connections() != before - 2:
        pass


async def test_redelivered_and_released_runs_wake_workers(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    await claim_one(queue)
    await queue.release("w", ["a"])
    assert await queue.wait("x", for_work=True, wait_s=1) == Notice(work=True)
    await queue.claim("w", max_runs=1, lease_s=0)
    await queue.reap()
    assert await queue.wait("x", for_work=True, wait_s=1) == Notice(work=True)


# Replies


async def test_replies_wake_their_reader(queue: RedisQueue):
    await queue.submit([run("a")], reply_to="gw")
    delivery = await claim_one(queue)
    reading = asyncio.create_task(read(queue, wait_s=30))
    await asyncio.sleep(0)
    await queue.finish("w", [done(delivery, b"result")])
    assert await reading == [Reply("a", b"result")]


async def test_replies_come_in_parts_and_in_order(queue: RedisQueue):
    await queue.submit(runs(10), reply_to="gw")
    for delivery in await claim(queue):
        await queue.finish("w", [done(delivery)])
    parts: list[list[Reply]] = [
        await queue.replies("gw", max_replies=4, wait_s=0) for _ in range(4)
    ]
    assert [len(part) for part in parts] == [4, 4, 2, 0]
    ids = [reply.run_id for part in parts for reply in part]
    assert ids == [one.run_id for one in runs(10)]


async def test_a_read_whose_connection_broke_loses_nothing(make_queue: MakeQueue, keys: Keys):
    queue = make_queue()
    await queue.submit([run("a"), run("b")], reply_to="gw")
    first, second = await claim(queue)
    reading = asyncio.create_task(read(queue, wait_s=30))
    await asyncio.sleep(0)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    await queue.finish("w", [done(first, b"1")])
    # One reader gets it and breaks before it comes back for more: it is still there.
    assert await read(queue) == [Reply("a", b"1")]
    successor = make_queue()
    assert await read(successor) == [Reply("a", b"1")]
    await successor.finish("w", [done(second, b"2")])
    assert await read(successor) == [Reply("b", b"2")]
    assert 0 < await keys.ttl_ms("replies:gw") <= 120_000


async def test_what_was_sent_together_stays_until_all_of_it_was_handed_out(make_queue: MakeQueue):
    queue = make_queue()
    await queue.submit([run("a"), run("b")], reply_to="gw")
    await queue.finish("w", [done(one, one.run_id.encode()) for one in await claim(queue)])
    assert await queue.replies("gw", max_replies=1, wait_s=0) == [Reply("a", b"a")]
    await queue.close()
    assert await read(make_queue()) == [Reply("a", b"a"), Reply("b", b"b")]


async def test_close_removes_what_was_handed_out(make_queue: MakeQueue):
    queue = make_queue()
    await queue.submit([run("a")], reply_to="gw")
    await queue.finish("w", [done(await claim_one(queue))])
    assert len(await read(queue)) == 1
    await queue.close()
    assert await read(make_queue()) == []


# Stats


async def test_stats_count(queue: RedisQueue, keys: Keys, server: Server):
    await queue.submit([run("a", b"12345"), run("b", b"123", job="other")], reply_to="gw")
    await queue.submit([run("c", b"1")], reply_to="gw")
    await claim_one(queue)
    await queue.announce("w1", slots=4, ttl_s=60)
    await queue.announce("w1", slots=5, ttl_s=60)
    await queue.announce("w2", slots=2, ttl_s=60)
    await queue.announce("dead", slots=100, ttl_s=0.001)
    await until_ms_passed(server, 2)
    stats = await queue.stats()
    assert (stats.queued, stats.leased, stats.queued_bytes) == (2, 1, 4)
    assert (stats.workers, stats.slots) == (2, 7)
    assert 0 < stats.oldest_queued_ms < 60_000
    await queue.retire("w1")
    await queue.retire("w2")
    await queue.cancel(["a", "b", "c"])
    stats = await queue.stats()
    assert (stats.queued, stats.leased, stats.workers, stats.slots) == (0, 0, 0, 0)
    assert stats.finished_total == 3
    assert stats.oldest_queued_ms == 0
    assert await keys.lasting() == set()


async def test_two_queues_on_one_server_are_apart(make_queue: MakeQueue, embedded: EmbeddedServer):
    queue = make_queue()
    other = RedisQueue.from_url(embedded.url, name=uuid.uuid4().hex)
    await queue.submit([run("a")], reply_to="gw")
    assert await claim(other) == []
    assert (await other.stats()).queued == 0
    await other.close()


# All together


async def wait_for_all(queue: RedisQueue, gateway: str, ids: list[str]) -> Counter[str]:
    """Submit in batches; count every answer that comes, by whichever way."""
    answers: Counter[str] = Counter()
    for start in range(0, len(ids), 50):
        batch = [run(run_id) for run_id in ids[start : start + 50]]
        receipts = await queue.submit(batch, reply_to=gateway)
        answers.update(one.run_id for one in receipts if one.state == "done")
    while answers.total() < len(ids):
        replies = await queue.replies(gateway, max_replies=64, wait_s=1)
        answers.update(reply.run_id for reply in replies)
    return answers


async def work(queue: RedisQueue, worker: str, *, loses_every: int) -> None:
    """Work until cancelled; lose the lease of every so many runs at their first delivery."""
    taken = itertools.count(1)
    while True:
        deliveries = await queue.claim(worker, max_runs=16, lease_s=5)
        lost = [one for one in deliveries if one.attempt == 1 and next(taken) % loses_every == 0]
        for one in lost:
            await lapse(queue, worker, one.run_id)
        await queue.finish(worker, [done(one) for one in deliveries if one not in lost])
        await queue.reap()
        if not deliveries:
            await queue.wait(worker, for_work=True, wait_s=1)


async def test_under_load_each_gateway_gets_each_of_its_runs_once(
    make_queue: MakeQueue, keys: Keys
):
    queue = make_queue()
    waits_for = {
        gateway: [f"r{number}" for number in numbers]
        for gateway, numbers in {"one": range(400), "two": range(200, 600)}.items()
    }
    workers = [asyncio.create_task(work(queue, f"w{n}", loses_every=5 + n)) for n in range(3)]
    waiting = [wait_for_all(queue, gateway, ids) for gateway, ids in waits_for.items()]
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    for task in workers:
        task.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    for (gateway, ids), counts in zip(waits_for.items(), answers, strict=True):
        assert counts == Counter(ids)
        assert await read(queue, gateway) == []
    assert (await queue.stats()).redelivered_total > 0
    assert await keys.lasting() == set()
