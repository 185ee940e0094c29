"""Calls that share a round trip into a real queue: each is answered as if it had gone alone."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from typing import override

import pytest
from gateway_pool import until

from rollyard_queue.base import QueueFull, QueueUnavailable
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import FinishedRun, QueuedRun, SubmitReceipt
from rollyard_queue.redis import RedisQueue
from rollyard_service import submissions
from rollyard_service.submissions import MAX_RUNS, Submission, Submissions

REPLY_TO = "me"


class CountingQueue(RedisQueue):
    """A real queue that notes how many runs each submit had."""

    sizes: list[int]

    @override
    async def submit(self, runs: Sequence[QueuedRun], *, reply_to: str) -> list[SubmitReceipt]:
        self.sizes.append(len(runs))
        return await super().submit(runs, reply_to=reply_to)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def server(anyio_backend: str) -> AsyncGenerator[EmbeddedServer]:
    async with EmbeddedServer() as one:
        yield one


def open_queue(server: EmbeddedServer, *, max_queued: int = 10_000) -> CountingQueue:
    queue = CountingQueue.from_url(server.url, max_queued=max_queued)
    queue.sizes = []
    return queue


def sender(queue: CountingQueue, results: dict[str, bytes] | None = None) -> Submissions:
    kept: dict[str, bytes] = {} if results is None else results
    return Submissions(queue, reply_to=REPLY_TO, on_result=kept.__setitem__)


def calls(one: Submissions, sizes: Sequence[int], name: str = "run") -> list[Submission]:
    numbers = iter(range(sum(sizes)))
    return [
        one.add(
            [QueuedRun(f"{name}-{next(numbers)}", b"{}") for _ in range(size)], size_bytes=2 * size
        )
        for size in sizes
    ]


async def outcomes(group: Sequence[Submission]) -> list[object]:
    return [
        type(answer)
        for answer in await asyncio.gather(*(one.answered for one in group), return_exceptions=True)
    ]


async def test_calls_of_one_moment_share_few_round_trips(server: EmbeddedServer) -> None:
    queue = open_queue(server)
    group = calls(sender(queue), [1] * 200)
    assert await outcomes(group) == [type(None)] * 200
    assert sum(queue.sizes) == 200
    assert len(queue.sizes) == 1
    assert all(one.landed for one in group)
    assert (await queue.stats()).queued == 200
    await queue.close()


async def test_a_lone_call_goes_at_once_and_a_large_one_goes_alone(server: EmbeddedServer) -> None:
    queue = open_queue(server)
    one = sender(queue)
    assert await outcomes(calls(one, [1], "lone")) == [type(None)]
    assert queue.sizes == [1]
    group = calls(one, [5, 1024, 5])
    assert await outcomes(group) == [type(None)] * 3
    assert sorted(queue.sizes[1:]) == [5, 5, 1024]
    assert max(size for size in queue.sizes if size != 1024) <= MAX_RUNS
    await queue.close()


async def test_where_all_do_not_fit_those_that_do_are_taken(server: EmbeddedServer) -> None:
    queue = open_queue(server, max_queued=10)
    group = calls(sender(queue), [1] * 40)
    answers = await outcomes(group)
    assert answers.count(type(None)) == 10
    assert answers.count(QueueFull) == 30
    assert (await queue.stats()).queued == 10
    assert len(queue.sizes) < 80  # by halves: not one round trip for each refusal and more
    await queue.close()


async def test_a_batch_is_taken_whole_or_not_at_all(server: EmbeddedServer) -> None:
    queue = open_queue(server, max_queued=10)
    answers = await outcomes(calls(sender(queue), [4, 8, 4]))
    assert answers == [type(None), QueueFull, type(None)]
    assert (await queue.stats()).queued == 8
    await queue.close()


async def test_the_same_id_in_two_calls_is_queued_once(server: EmbeddedServer) -> None:
    queue, results = open_queue(server), dict[str, bytes]()
    one = sender(queue, results)
    group = [*calls(one, [1], "same"), *calls(one, [1], "same")]
    assert await outcomes(group) == [type(None)] * 2
    [delivery] = await queue.claim("w", max_runs=5, lease_s=30)
    result = b'{"run_id":"same-0","outcome":"ok"}'
    await queue.finish("w", [FinishedRun("same-0", delivery.attempt, result)])
    assert await outcomes(calls(one, [1], "same")) == [type(None)]
    assert results == {"same-0": result}  # it had ended: its result comes with the receipt
    await queue.close()


async def test_what_is_given_up_says_when_it_has_landed(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "SUBMIT_S", 0.2)
    queue = open_queue(server)
    one = sender(queue)
    assert await outcomes(calls(one, [1], "first")) == [type(None)]  # a connection is there
    landed: list[str] = []
    os.kill(server.pid, signal.SIGSTOP)
    try:
        groups = [calls(one, [1], name) for name in ("sent", "also-sent")]
        await until(lambda: len(queue.sizes) >= 2)
        late = calls(one, [1], "later")  # waits behind those, or travels with them
        group = [*groups[0], *groups[1], *late]
        for submission in group:
            run_id = submission.runs[0].run_id
            submission.on_landed = lambda run_id=run_id: landed.append(run_id)
        assert await outcomes(group) == [QueueUnavailable] * 3
        sent = [submission for submission in group if submission.sent]
        assert not any(submission.landed for submission in sent)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(lambda: all(submission.landed for submission in group))
    assert {submission.runs[0].run_id for submission in sent} <= set(landed)
    await one.close()
    queued = (await queue.stats()).queued
    assert queued == 1 + len(sent)  # what was never sent is not there
    await queue.close()
