"""Traffic on a queue that loses its servers: each run is answered once, and rightly."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from rollyard_queue.base import QueueUnavailable
from rollyard_queue.records import FinishedRun, QueuedRun
from rollyard_queue.redis import RedisQueue

PAUSE_S = 0.02
LEASE_S = 2.0  # short, for leases that a failover leaves behind are waited for


class Traffic:
    """One gateway's runs, some workers, and what came back.

    The gateway does what rollyard_service's does: what it has no answer to it asks for again when
    the queue was away, and after a while anyway. ``answers`` counts the answers that a caller would
    get, ``wrong`` those that are not the run's own.
    """

    def __init__(self, make: Callable[[], RedisQueue], *, workers: int = 2) -> None:
        self._make = make
        self._workers = workers
        self._numbers = itertools.count()
        self.waiting: dict[str, QueuedRun] = {}
        self.answers: Counter[str] = Counter()
        self.wrong: list[tuple[str, bytes]] = []
        self.outages = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._queues: list[RedisQueue] = []

    async def __aenter__(self) -> "Traffic":
        gateway = self._queue()
        steps = [self._read(gateway), self._ask_again(gateway), self._reap(gateway)]
        steps += [self._work(self._queue(), f"w{number}") for number in range(self._workers)]
        self._gateway = gateway
        self._tasks = [asyncio.create_task(step) for step in steps]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in self._queues:
            try:
                await queue.close()
            except QueueUnavailable:
                self.outages += 1
        faults = [
            end
            for end in ends
            if isinstance(end, Exception) and not isinstance(end, asyncio.CancelledError)
        ]
        assert not faults, faults

    async def send(self, count: int) -> None:
        """Submit ``count`` more runs; a caller whose submission failed sends it again."""
        runs = [
            QueuedRun(f"run-{number}", str(number).encode())
            for number in itertools.islice(self._numbers, count)
        ]
        self.waiting |= {run.run_id: run for run in runs}
        while True:
            try:
                await self._submit(self._gateway, runs)
                return
            except QueueUnavailable:
                self.outages += 1
                await asyncio.sleep(PAUSE_S)

    async def all_answered(self, *, within_s: float = 40) -> None:
        async with asyncio.timeout(within_s):
            while self.waiting:
                await asyncio.sleep(PAUSE_S)

    def _queue(self) -> RedisQueue:
        self._queues.append(self._make())
        return self._queues[-1]

    def _answered(self, run_id: str, result: bytes) -> None:
        run = self.waiting.pop(run_id, None)
        if run is not None:  # else it was answered before: nobody waits for this one
            self.answers[run_id] += 1
            if result != b"ran " + run.payload:
                self.wrong.append((run_id, result))

    async def _submit(self, queue: RedisQueue, runs: list[QueuedRun]) -> None:
        for receipt in await queue.submit(runs, reply_to="gw"):
            if receipt.result is not None:
                self._answered(receipt.run_id, receipt.result)

    async def _read(self, queue: RedisQueue) -> None:
        while True:
            try:
                for reply in await queue.replies("gw", max_replies=64, wait_s=1):
                    self._answered(reply.run_id, reply.result)
            except QueueUnavailable:
                self.outages += 1
                await asyncio.sleep(PAUSE_S)

    async def _ask_again(self, queue: RedisQueue) -> None:
        while True:
            await asyncio.sleep(0.5)
            runs = list(self.waiting.values())[:512]
            try:
                if runs:
                    await self._submit(queue, runs)
            except QueueUnavailable:
                self.outages += 1

    async def _reap(self, queue: RedisQueue) -> None:
        while True:
            await asyncio.sleep(0.2)
            try:
                await queue.reap()
            except QueueUnavailable:
                self.outages += 1

    async def _work(self, queue: RedisQueue, worker: str) -> None:
        unsent: list[FinishedRun] = []
        while True:
            try:
                if unsent:
                    await queue.finish(worker, unsent)
                    unsent = []
                notice = await queue.wait(worker, for_work=True, wait_s=0.5)
                if notice.work:
                    unsent = [
                        FinishedRun(one.run_id, one.attempt, b"ran " + one.payload)
                        for one in await queue.claim(worker, max_runs=16, lease_s=LEASE_S)
                    ]
            except QueueUnavailable:
                self.outages += 1
                await asyncio.sleep(PAUSE_S)
