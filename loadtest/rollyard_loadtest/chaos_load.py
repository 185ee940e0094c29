"""Callers that go on through every fault, and the ledger of what they were told.

Programs are the soak's mix, with known right answers, and three kinds more: runs that outlast a
lease, runs with a deadline, and whole batches read off the wire line by line. A caller whose
gateway gives up asks another one for the same run, as a trainer with two gateways would.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import httpx2
from pydantic import ValidationError

import rollyard
from rollyard_loadtest.mix import Job, draw

PATIENCE_S = 120.0
"""A run without an answer for this long, all tries together, is lost: nothing takes as long."""
_CANCEL_EVERY_S = 0.2
_WIRE_RUNS = 8
_PAUSE_S = 0.2
_CONNECT_S = 2.0
_QUICK_RETRIES = 2
# Shares of the calls. Twins and late askers prove that an id has one result.
_TWIN, _LATE, _WIRE, _LONG, _DEADLINE = 0.06, 0.06, 0.06, 0.06, 0.04
_SCIENCE = frozenset({"numpy", "sympy"})


@dataclass(kw_only=True)
class Entry:
    """One run, from its first submission to its answer; times in seconds of the whole run."""

    run_id: str
    kind: str
    way: str
    """``call``, ``twin``, ``late`` or ``wire``: how it was asked for."""
    asked_s: float
    first_asked_s: float
    """Of this id, by anybody: its deadline counts from there."""
    answered_s: float | None = None
    outcome: str = ""
    message: str = ""
    attempt: int = 0
    refusals: int = 0
    """How often a gateway was given up for it, after all retries."""
    problem: str = ""
    """What is wrong with the answer, if anything is."""


@dataclass
class Ledger:
    """Everything that callers were told."""

    entries: list[Entry] = field(default_factory=list[Entry])
    duplicated: list[str] = field(default_factory=list[str])
    """A second answer on one stream, or another answer for the same id."""
    refusals: Counter[str] = field(default_factory=Counter[str])
    anew: int = 0
    """Ids whose second asker got another execution's result, the server having lost the first."""

    def open(self) -> list[Entry]:
        """Runs without an answer."""
        return [entry for entry in self.entries if entry.answered_s is None]


def chaos_jobs(seed: int, *, lease_s: float, science: bool) -> Iterator[Job]:
    """Jobs without end: the same for the same arguments."""
    chance = random.Random(f"jobs-{seed}")  # noqa: S311 - not for secrets
    for start in count(step=256):
        for job in draw(range(start, start + 256), seed):
            if not science and job.kind in _SCIENCE:
                continue  # without their template they cost a second of imports each
            yield job
            number = start + chance.randrange(256)
            kind = chance.random()
            if kind < _LONG:
                yield _long(number, chance.uniform(0.4, 2.2) * lease_s)
            elif kind < _LONG + _DEADLINE:
                yield _with_deadline(number, chance.uniform(0.5, 4.0))


def _printed(number: int, *outcomes: str) -> Callable[[rollyard.RunResult], str]:
    def check(result: rollyard.RunResult) -> str:
        if result.outcome not in outcomes:
            return f"{result.outcome} instead of {' or '.join(outcomes)}: {result.message}"
        if result.outcome == "ok" and result.stdout != f"{number}\n":
            return f"stdout is {result.stdout[:80]!r} instead of {number}"
        return ""

    return check


def _long(number: int, sleep_s: float) -> Job:
    code = f"import time\ntime.sleep({sleep_s:.3f})\nprint({number})"
    request = {"code": code, "limits": {"timeout_s": sleep_s + 60}}
    return Job("outlasts a lease", request, _printed(number, "ok"))


def _with_deadline(number: int, deadline_s: float) -> Job:
    request = {"code": f"print({number})", "deadline_s": round(deadline_s, 3)}
    return Job("deadline", request, _printed(number, "ok", "expired"))


class Load:
    """Callers in a closed loop against several gateways."""

    def __init__(
        self, addresses: list[str], *, callers: int, seed: int, lease_s: float, science: bool,
        now_s: Callable[[], float], forgotten: Callable[[float], bool],
    ) -> None:  # fmt: skip
        """``forgotten(since_s)``: has the server lost its memory since then?"""
        self.ledger = Ledger()
        self._addresses = addresses
        self._callers = callers
        self._seed = seed
        self._now_s = now_s
        self._forgotten = forgotten
        self._chance = random.Random(f"callers-{seed}")  # noqa: S311 - not for secrets
        self._jobs = chaos_jobs(seed, lease_s=lease_s, science=science)
        self._numbers = count()
        self._clients: list[rollyard.AsyncClient] = []
        self._quick: list[rollyard.AsyncClient] = []
        self._wires: list[httpx2.AsyncClient] = []

    async def run(self, *, until: Callable[[], bool]) -> None:
        """Call until told to stop; then return when all that was asked has been answered, or has
        waited for PATIENCE_S."""
        async with self._connections():

            async def caller(number: int) -> None:
                while not until():
                    await self._one(number)

            async with asyncio.TaskGroup() as tasks:
                for number in range(self._callers):
                    tasks.create_task(caller(number))

    @asynccontextmanager
    async def _connections(self) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for address in self._addresses:
                client = rollyard.AsyncClient(address)
                self._clients.append(await stack.enter_async_context(client))
                quick = rollyard.AsyncClient(address, max_retries=_QUICK_RETRIES)
                self._quick.append(await stack.enter_async_context(quick))
                transport = httpx2.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
                limits = httpx2.Timeout(PATIENCE_S, connect=_CONNECT_S)
                wire = httpx2.AsyncClient(
                    transport=transport, base_url="http://service", timeout=limits
                )
                self._wires.append(await stack.enter_async_context(wire))
            yield

    async def _one(self, home: int) -> None:
        """Each caller has a gateway that it asks first; else all would end up at a dead one."""
        kind, job = self._chance.random(), next(self._jobs)
        if job.cancel:
            await self._cancelled(job, home)
        elif kind < _TWIN:
            await self._twins(job)
        elif kind < _TWIN + _LATE:
            await self._late(job, home)
        elif kind < _TWIN + _LATE + _WIRE:
            jobs = [job, *(next(self._jobs) for _ in range(_WIRE_RUNS - 1))]
            await self._batch([one for one in jobs if not one.cancel], home)
        else:
            await self._answer(job, self._enter(job, "call"), home)

    # One answer --------------------------------------------------------------------------------

    def _enter(self, job: Job, way: str, earlier: Entry | None = None) -> Entry:
        now_s = self._now_s()
        entry = Entry(
            run_id=earlier.run_id if earlier else f"chaos-{self._seed}-{next(self._numbers)}",
            kind=job.kind, way=way, asked_s=now_s,
            first_asked_s=earlier.first_asked_s if earlier else now_s,
        )  # fmt: skip
        self.ledger.entries.append(entry)
        return entry

    async def _answer(self, job: Job, entry: Entry, home: int) -> rollyard.RunResult | None:
        """Ask for one run until it is answered, at one gateway after the other.

        Half of the callers leave the retries to the SDK, the others soon try another gateway.
        """
        number = home
        clients = self._clients if home // len(self._clients) % 2 else self._quick

        async def ask() -> rollyard.RunResult:
            nonlocal number
            while True:
                client = clients[number % len(clients)]
                number += 1
                try:
                    return await client.run(**job.request, run_id=entry.run_id)
                except rollyard.RollyardError as error:
                    self._refused(entry, error)
                    await asyncio.sleep(_PAUSE_S)

        return await self._in_time(ask, job, entry)

    async def _in_time(
        self, ask: Callable[[], Awaitable[rollyard.RunResult]], job: Job, entry: Entry
    ) -> rollyard.RunResult | None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                result = await ask()
        except TimeoutError:
            return None  # stays open in the ledger: lost
        self._record(entry, job, result)
        return result

    def _record(self, entry: Entry, job: Job, result: rollyard.RunResult) -> None:
        entry.answered_s = self._now_s()
        entry.outcome, entry.message, entry.attempt = result.outcome, result.message, result.attempt
        if result.outcome == "infra_error":
            return  # counted apart, and to be explained by the faults
        entry.problem = job.check(result)
        if result.run_id != entry.run_id:
            entry.problem = f"the answer is of run {result.run_id}"
        deadline_s = job.request.get("deadline_s", 0.0)
        if result.outcome == "expired" and entry.answered_s - entry.first_asked_s < deadline_s:
            entry.problem = "expired before its deadline"

    def _refused(self, entry: Entry, error: Exception) -> None:
        entry.refusals += 1
        self.ledger.refusals[type(error).__name__] += 1

    # Two askers --------------------------------------------------------------------------------

    async def _twins(self, job: Job) -> None:
        """One id at two gateways at once: one execution, and both get its result."""
        first = self._enter(job, "twin")
        second = self._enter(job, "twin", first)
        one, other = await asyncio.gather(self._answer(job, first, 0), self._answer(job, second, 1))
        self._compare(first, one, other)

    async def _late(self, job: Job, home: int) -> None:
        """Asked for again after its end: the stored result, not another execution."""
        entry = self._enter(job, "late")
        first = await self._answer(job, entry, home)
        if first is not None:
            again = self._enter(job, "late", entry)
            self._compare(entry, first, await self._answer(job, again, home + 1))

    def _compare(
        self, entry: Entry, one: rollyard.RunResult | None, other: rollyard.RunResult | None
    ) -> None:
        if one is None or other is None or one == other:
            return
        if self._forgotten(entry.asked_s):
            self.ledger.anew += 1
        else:
            self.ledger.duplicated.append(
                f"{entry.run_id} ({entry.kind}) has two results: {_short(one)} and {_short(other)}"
            )

    async def _cancelled(self, job: Job, home: int) -> None:
        entry = self._enter(job, "call")
        running = asyncio.create_task(self._answer(job, entry, home))
        while not running.done():
            # Again until it is answered: it may have been forgotten, or not have come yet.
            await asyncio.wait([running], timeout=_CANCEL_EVERY_S)
            client = self._chance.choice(self._clients)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    await client.cancel(entry.run_id)
            except (rollyard.RollyardError, TimeoutError):
                self.ledger.refusals["cancel not taken"] += 1
        await running

    # The wire ----------------------------------------------------------------------------------

    async def _batch(self, jobs: list[Job], home: int) -> None:
        """A batch as NDJSON without the SDK: each id has one line, whatever happens."""
        entries = [(self._enter(job, "wire"), job) for job in jobs]
        waiting = {entry.run_id: (entry, job) for entry, job in entries}
        number = home
        try:
            async with asyncio.timeout(PATIENCE_S):
                while waiting:
                    try:
                        await self._read(self._wires[number % len(self._wires)], waiting)
                    except (httpx2.HTTPError, _Refused) as error:
                        for entry, _ in waiting.values():
                            self._refused(entry, error)
                        await asyncio.sleep(_PAUSE_S)
                    number += 1
        except TimeoutError:
            pass  # what waits stays open in the ledger: lost

    async def _read(self, wire: httpx2.AsyncClient, waiting: dict[str, tuple[Entry, Job]]) -> None:
        runs = [{**job.request, "run_id": run_id} for run_id, (_, job) in waiting.items()]
        seen: set[str] = set()
        async with wire.stream(
            "POST", "/v1/batches", json={"runs": runs}, headers={"Accept": "application/x-ndjson"}
        ) as answer:
            if answer.status_code != 200:
                raise _Refused(f"status {answer.status_code}")
            async for line in answer.aiter_lines():
                try:
                    result = rollyard.RunResult.model_validate_json(line)
                except ValidationError as error:
                    if not _is_json(line):
                        raise _Refused("a line was cut off") from error
                    self.ledger.duplicated.append(f"a line that is no result: {line[:200]}")
                    continue
                if result.run_id in seen or result.run_id not in waiting:
                    self.ledger.duplicated.append(f"a second line for {result.run_id}")
                    continue
                seen.add(result.run_id)
                self._record(*waiting.pop(result.run_id), result)


class _Refused(Exception):
    """The gateway gave no batch; it is asked for again."""


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _short(result: rollyard.RunResult) -> str:
    return (
        f"{result.outcome} by {result.worker_id}, attempt {result.attempt}, "
        f"{result.wall_ms:.1f} ms, {result.message!r}"
    )
