"""Loads for measuring a service's costs: few calls, by the SDK, each answer checked."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import rollyard
from rollyard.types import Limits
from rollyard_loadtest.workload import Work


class WrongAnswer(Exception):
    """The service does not work: its costs mean nothing. The message has the first wrong result."""


@dataclass(frozen=True, slots=True)
class Called:
    """One answered call; times in seconds since the load's start."""

    kind: str
    asked_s: float
    """When it was due, not when it could be sent."""
    answered_s: float
    result: rollyard.RunResult
    nominal_s: float = 0.0
    """What the program takes by itself, where its scenario knows it (Work.nominal_s)."""
    timeout_s: float = Limits().timeout_s
    """Its time limit."""
    number: int = 0
    """Of the load's calls, in the order of asking: those of one moment have an order too."""

    @property
    def latency_s(self) -> float:
        return self.answered_s - self.asked_s


class Calls:
    """Makes loads on one client; each returns what it was told, in the order of the answers.

    Every load raises WrongAnswer when a result is not the program's.
    """

    def __init__(self, client: rollyard.AsyncClient, works: Iterator[Work]) -> None:
        self._client = client
        self._works = works
        self._called: list[Called] = []
        self._asked, self._began = 0, 0.0

    async def closed(self, in_flight: int, *, for_s: float, at_most: int = 1 << 30) -> list[Called]:
        """Keep so many in flight for so long, or until so many were asked for."""
        self._start()
        left = at_most

        async def lane() -> None:
            nonlocal left
            while left > 0 and (now_s := self._now()) < for_s:
                left -= 1
                await self._call(now_s)

        await asyncio.gather(*(lane() for _ in range(in_flight)))
        return self._called

    async def poisson(self, rate_per_s: float, *, for_s: float, seed: str) -> list[Called]:
        """Ask at random times, whatever the answers."""
        self._start()
        chance = random.Random(f"calls-{seed}")  # noqa: S311 - not for secrets
        due_s = chance.expovariate(rate_per_s)
        async with asyncio.TaskGroup() as tasks:
            while due_s < for_s:
                await asyncio.sleep(max(0.0, due_s - self._now()))
                tasks.create_task(self._call(due_s))
                due_s += chance.expovariate(rate_per_s)
        return self._called

    async def burst(self, runs: int) -> list[Called]:
        """Ask for all at once."""
        self._start()
        await asyncio.gather(*(self._call(0.0) for _ in range(runs)))
        return self._called

    def _start(self) -> None:
        self._called, self._asked = [], 0
        self._began = time.monotonic()

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _call(self, due_s: float) -> None:
        work, number = next(self._works), self._asked
        self._asked += 1
        result = await self._client.submit(rollyard.RunRequest.model_validate(work.request()))
        answered_s = self._now()
        right = result.outcome == work.outcome and work.stdout in (None, result.stdout)
        if not right and "null" not in result.template:
            raise WrongAnswer(
                f"{work.kind}: {result.outcome} instead of {work.outcome}; {result.message}"
                f" {result.stderr[-300:]}"
            )
        self._called.append(
            Called(
                work.kind, due_s, answered_s, result, work.nominal_s,
                timeout_s=work.limits.get("timeout_s", Limits().timeout_s), number=number,
            )
        )  # fmt: skip
