"""Puts a load on a target and tallies what comes of it. One event loop, one client process."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import cycle, islice
from typing import Any
from uuid import uuid4

from rollyard_loadtest.arrivals import Thinking, poisson, share
from rollyard_loadtest.load import Burst, Closed, Load, Poisson
from rollyard_loadtest.tally import Answer, Tally
from rollyard_loadtest.target import Lost, Refused, Target
from rollyard_loadtest.workload import Work

RETRY_S = (0.05, 5.0)
"""First and longest pause before a refused request is sent again; each doubles."""
BREATH = 32
"""Requests that a client behind its schedule sends before it looks for answers."""
WARMUP_LANES = 8


def window(load: Load) -> tuple[float, float]:
    """Seconds since the start between which runs count."""
    if isinstance(load, Burst):
        return 0.0, load.duration_s
    return load.warmup_s, load.warmup_s + load.duration_s


class Driver:
    """Drives one client's share of a load; use once."""

    def __init__(
        self,
        target: Target,
        load: Load,
        works: Sequence[Work],
        tally: Tally,
        *,
        seed: str,
        client: int = 0,
        clients: int = 1,
    ) -> None:
        self._target = target
        self._load = load
        self._works = cycle(works)
        self._tally = tally
        self._seed = f"{seed}-{client}"
        # Ids are idempotency keys: with the seed's alone the second load test of a minute would
        # get the results of the first.
        self._ids = f"b{uuid4().hex[:12]}"
        self._client, self._clients = client, clients
        self._pauses = random.Random(f"pauses-{self._seed}")  # noqa: S311 - not for secrets
        self._began = 0.0
        self._requests = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_flight = 0
        """Runs sent and not yet answered."""

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def warm(self) -> None:
        """Send a burst's first runs, so that connections, slots and templates exist."""
        if not isinstance(self._load, Burst) or not self._load.warmup_runs:
            return
        self._began = time.monotonic() + 1e6  # whatever is due now is far before the window
        batch = self._load.batch
        left = iter(range(0, share(self._load.warmup_runs, self._client, self._clients), batch))

        async def lane() -> None:
            for _ in left:
                await self._request(self._now(), batch)

        await asyncio.gather(*(lane() for _ in range(WARMUP_LANES)))

    async def run(self, began: float) -> None:
        """Make the load from ``began`` (of time.monotonic) on, and wait for the last answer."""
        self._began = began
        await self._until(0.0)
        end_s = window(self._load)[1]
        making = asyncio.create_task(self._make(end_s))
        try:
            async with asyncio.timeout(end_s + self._load.drain_s):
                await making
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            making.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(making, *self._tasks, return_exceptions=True)

    async def _make(self, end_s: float) -> None:
        match self._load:
            case Closed() as load:
                self._closed(load, end_s)
            case Poisson() as load:
                await self._poisson(load, end_s)
            case Burst() as load:
                await self._burst(load, end_s)
            case load:
                raise TypeError(f"no driver for {type(load).__name__}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until(self, at_s: float) -> None:
        wait_s = at_s - self._now()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def _closed(self, load: Closed, end_s: float) -> None:
        mine = share(load.in_flight, self._client, self._clients)

        async def lane(runs: int) -> None:
            while (now := self._now()) < end_s:
                await self._request(now, runs)

        for runs in _lots(mine, load.runs_per_request):
            self._spawn(lane(runs))

    async def _poisson(self, load: Poisson, end_s: float) -> None:
        rate = load.rate_per_s / load.batch / self._clients
        for number, due_s in enumerate(poisson(rate, end_s, self._seed)):
            await self._until(due_s)
            if number % BREATH == 0:
                await asyncio.sleep(0)
            self._spawn(self._request(due_s, load.batch))

    async def _burst(self, load: Burst, end_s: float) -> None:
        async def rollouts(runs: int, thinking: Thinking) -> None:
            due_s = 0.0
            for turn in range(load.turns):
                if turn:
                    due_s = self._now() + thinking.draw_s()
                    await self._until(due_s)
                if due_s >= end_s:
                    return
                await self._request(due_s, runs)

        mine = share(load.rollouts, self._client, self._clients)
        for number, runs in enumerate(_lots(mine, load.batch)):
            thinking = Thinking(*load.think_s, seed=f"{self._seed}-{number}")
            self._spawn(rollouts(runs, thinking))
            if number % BREATH == 0:
                await asyncio.sleep(0)

    async def _request(self, due_s: float, runs: int) -> None:
        """Send ``runs`` works that were due together, until each is answered or given up."""
        works = list(islice(self._works, runs))
        self._requests += 1
        request = _Request(works, due_s, self._tally, self._now)
        prefix = f"{self._ids}-{self._requests}"
        now = self._now()
        self._tally.sent(runs, due_s, now)
        self.in_flight += runs
        try:
            await self._send(request, prefix)
        except asyncio.CancelledError:
            request.lose("no answer before the end of the load test (drain_s)")
            raise
        finally:
            self.in_flight -= runs

    async def _send(self, request: "_Request", prefix: str) -> None:
        tries = 0
        while True:
            try:
                await self._target.send(request.works, prefix, request.take)
            except Refused as refusal:
                # A request of which some runs were answered is not sent whole again.
                if tries >= self._load.retries or request.begun:
                    request.refuse(refusal.places)
                    break
                self._tally.retried += len(request.works)
                await asyncio.sleep(self._pause_s(tries, refusal.retry_after_s or 0.0))
                tries += 1
            except Lost as loss:
                request.lose(str(loss))
                return
            else:
                break
        request.lose("the request ended without its answer")

    def _pause_s(self, tries: int, asked_s: float) -> float:
        first, longest = RETRY_S
        backoff = min(longest, first * 2.0**tries)
        return max(asked_s, backoff) * self._pauses.uniform(1.0, 1.25)


class _Request:
    """What is known of one request's runs; each is counted once."""

    def __init__(
        self, works: list[Work], due_s: float, tally: Tally, now: Callable[[], float]
    ) -> None:
        self.works = works
        self._due_s = due_s
        self._tally = tally
        self._now = now
        self._settled = bytearray(len(works))

    @property
    def begun(self) -> bool:
        return any(self._settled)

    def take(self, place: int, answer: Answer) -> None:
        if self._settled[place]:
            self._tally.duplicate(self.works[place])
            return
        self._settled[place] = 1
        self._tally.answered(self.works[place], answer, self._due_s, self._now())

    def refuse(self, places: Sequence[int]) -> None:
        for place in places:
            if not self._settled[place]:
                self._settled[place] = 1
                self._tally.refuse(self._due_s, self._now())

    def lose(self, why: str) -> None:
        """Count all that are neither answered nor refused."""
        for place, settled in enumerate(self._settled):
            if not settled:
                self._settled[place] = 1
                self._tally.lose(self.works[place], why)


def _lots(total: int, size: int) -> Iterator[int]:
    """``total`` in lots of at most ``size``."""
    while total > 0:
        yield min(size, total)
        total -= size
