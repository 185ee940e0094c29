"""The worker for benchmarks: answers everything, keeps its promises to the queue, and owns up."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

import rollyard
from rollyard._up import Plan
from rollyard.local import LocalService
from rollyard.types import RunResult
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import QueuedRun, Reply
from rollyard_queue.redis import RedisQueue
from rollyard_sandbox.null import NullWorker

WITHIN_S = 20.0
CLOCKS_DIFFER_MS = 2.0
"""Of 2 s, the most by which the server's clock, while it is being set, and the worker's part."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def queue(anyio_backend: str) -> AsyncGenerator[RedisQueue]:
    async with EmbeddedServer() as server:
        one = RedisQueue.from_url(server.url)
        yield one
        await one.close()


async def answers(queue: RedisQueue, count: int) -> list[Reply]:
    found: list[Reply] = []
    async with asyncio.timeout(WITHIN_S):
        while len(found) < count:
            found += await queue.replies("me", max_replies=512, wait_s=1)
    return found


def runs(count: int) -> list[QueuedRun]:
    return [QueuedRun(f"run-{index}", b'{"code": "print(1)"}') for index in range(count)]


async def test_every_run_is_answered_once_and_says_that_nothing_ran(queue: RedisQueue) -> None:
    worker = NullWorker(queue, worker_id="null-1", slots=100, service_s=0, lease_s=30)
    serving = asyncio.create_task(worker.run())
    for start in range(0, 3000, 500):
        await queue.submit(runs(3000)[start : start + 500], reply_to="me")
    replies = await answers(queue, 3000)
    assert {reply.run_id for reply in replies} == {run.run_id for run in runs(3000)}
    for reply in (replies[0], replies[-1]):
        result = RunResult.model_validate_json(reply.result)
        assert (result.run_id, result.outcome, result.exit_code) == (reply.run_id, "ok", 0)
        assert result.degraded == ["nothing-was-run"]
        assert (result.template, result.worker_id) == ("null", "null-1")
        assert "null worker" in result.message
    worker.stop()
    await serving
    stats = await queue.stats()
    assert (stats.queued, stats.leased, stats.workers) == (0, 0, 0)


async def test_service_time_bounds_what_it_holds_and_leases_outlive_it(queue: RedisQueue) -> None:
    """Three slots, 2 s each, leases of 1.6 s: eight runs take three turns, none twice."""
    # Renewed each third of a lease: a machine that stands still for a second does not end one.
    worker = NullWorker(queue, worker_id="null-1", slots=3, service_s=2.0, lease_s=1.6)
    serving = asyncio.create_task(worker.run())
    await queue.submit(runs(8), reply_to="me")

    async def reap() -> None:
        while True:
            await queue.reap()
            await asyncio.sleep(0.02)

    reaping = asyncio.create_task(reap())
    replies = await answers(queue, 8)
    reaping.cancel()
    await asyncio.gather(reaping, return_exceptions=True)
    results = [RunResult.model_validate_json(reply.result) for reply in replies]
    assert {result.attempt for result in results} == {1}
    assert {result.wall_ms for result in results} == {2000.0}
    # By when each was claimed: never a fourth while three are held, and three at once. (Leases
    # would not tell: the next are claimed while the results of the last ones still travel.)
    claimed_ms = sorted(result.queued_ms for result in results)
    for first, fourth in zip(claimed_ms, claimed_ms[3:], strict=False):
        assert fourth - first >= 2000 - CLOCKS_DIFFER_MS
    assert claimed_ms[2] - claimed_ms[0] < 2000
    worker.stop()
    await serving


async def test_stop_answers_what_is_held_and_takes_no_more(queue: RedisQueue) -> None:
    worker = NullWorker(queue, worker_id="null-1", slots=2, service_s=0.3, lease_s=30)
    serving = asyncio.create_task(worker.run())
    await queue.submit(runs(4), reply_to="me")
    async with asyncio.timeout(WITHIN_S):
        while (await queue.stats()).leased < 2:
            await asyncio.sleep(0.005)
    worker.stop()
    await serving
    assert len(await answers(queue, 2)) == 2
    stats = await queue.stats()
    assert (stats.queued, stats.leased) == (2, 0)


def test_whole_service_without_a_sandbox_marks_each_result() -> None:
    plan = Plan(null_for_benchmarks=True, sealed=True, stop_timeout_s=10.0)
    service = LocalService(plan).start()
    try:
        with rollyard.Client(service.address) as client:
            results = client.run_all(["print(1)"] * 200)
    finally:
        service.stop()
    assert len({result.run_id for result in results}) == 200
    assert {(result.outcome, result.stdout) for result in results} == {("ok", "")}
    assert {tuple(result.degraded) for result in results} == {("nothing-was-run",)}
