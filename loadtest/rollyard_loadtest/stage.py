"""One stage of a load test: starts the client processes, follows them, and sums up."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollyard_loadtest.client import Order
from rollyard_loadtest.drive import window
from rollyard_loadtest.figures import KindFigures, Second, StageFigures
from rollyard_loadtest.histogram import merged
from rollyard_loadtest.load import Burst
from rollyard_loadtest.machine import SpeedProbe
from rollyard_loadtest.scenario import Stage
from rollyard_loadtest.stack import Parts, Stack
from rollyard_loadtest.tally import MAX_EXAMPLES, UNJUDGED
from rollyard_loadtest.target import Address

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
LEAD_S = 0.05
"""Between the order to begin and the begin: all clients hear it before."""
LINE_BYTES = 1 << 26
BURST_LOOK_S = 1.0
"""After a burst's begin memory is looked at."""
START_S = 300.0
"""Within which clients must be ready, warm-up runs included."""

type Watch = Callable[[Second], None]
"""Told of each second as it ends."""


class ClientDied(Exception):
    """A client process of the load test ended early; the message holds its last words."""


@dataclass
class _Client:
    process: asyncio.subprocess.Process
    ticks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tally: dict[str, Any] = field(default_factory=dict[str, Any])

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            said = (await self.process.stderr.read()).decode(errors="replace").strip()
            raise ClientDied(f"a client process of the load test ended early:\n{said[-2000:]}")
        return json.loads(line)

    def say(self, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields).encode() + b"\n")


class StageRun:
    """Puts one load on one target; use once."""

    def __init__(
        self,
        scenario: str,
        stage: Stage,
        addresses: Sequence[Address],
        *,
        seed: str,
        watch: Watch,
        stack: Stack | None = None,
    ) -> None:
        self._scenario = scenario
        self._stage = stage
        self._addresses = addresses
        self._seed = seed
        self._watch = watch
        self._stack = stack
        self._clients: list[_Client] = []
        self._watched = 0
        self._usage: dict[str, Parts] = {}

    async def run(self) -> StageFigures:
        """Carry it out.

        Raises:
            ClientDied: a client process did not come to its end.
        """
        load = self._stage.load
        try:
            self._clients = [await self._start(number) for number in range(load.clients)]
            async with asyncio.timeout(START_S):
                await asyncio.gather(*(client.line() for client in self._clients))
            began = time.monotonic() + LEAD_S
            for client in self._clients:
                client.say(began=began)
            with SpeedProbe() as probe:
                await self._measured(began)
            return self._figures(probe)
        finally:
            for client in self._clients:
                await _end(client)

    async def _measured(self, began: float) -> None:
        following = asyncio.gather(*(self._follow(client) for client in self._clients))
        if self._stack is None:
            await following
            return
        sampling = asyncio.create_task(self._sample(self._stack, began))
        try:
            await following
        finally:
            sampling.cancel()
            await asyncio.wait([sampling])
        if not sampling.cancelled():
            sampling.result()
        self._usage.setdefault("after", self._stack.parts())
        self._usage.setdefault("memory", self._stack.parts(memory=True))

    async def _start(self, number: int) -> _Client:
        order = Order(
            scenario=self._scenario,
            load=self._stage.load.model_dump(),
            address=self._addresses[number % len(self._addresses)],
            seed=self._seed,
            client=number,
            clients=self._stage.load.clients,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "rollyard_loadtest.client",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, limit=LINE_BYTES,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(order.to_json().encode() + b"\n")
        return _Client(process)

    async def _follow(self, client: _Client) -> None:
        while not client.tally:
            event = await client.line()
            if event.pop("event") == "done":
                client.tally = event
            else:
                client.ticks.append(event)
                self._tell()

    def _tell(self) -> None:
        """Tell the watcher of the seconds that all clients have reported."""
        while all(len(client.ticks) > self._watched for client in self._clients):
            self._watch(self._second(self._watched))
            self._watched += 1

    def _second(self, number: int) -> Second:
        ticks = [client.ticks[number] for client in self._clients if number < len(client.ticks)]
        latencies = merged(tick["latencies"] for tick in ticks)
        quantiles = latencies.quantiles((0.5, 0.99))
        counts = ("in_flight", "good", "wrong", "unjudged", "refused", "lost")
        return Second(
            at_s=max(tick["at_s"] for tick in ticks),
            during_s=max(tick["during_s"] for tick in ticks),
            p50_s=quantiles["0.5"],
            p99_s=quantiles["0.99"],
            **{name: sum(tick[name] for tick in ticks) for name in counts},
        )

    async def _sample(self, stack: Stack, began: float) -> None:
        """Usage of the parts at the window's begin and end, and memory between."""
        load = self._stage.load
        first, last = window(load)
        is_burst = isinstance(load, Burst)
        await _until(began + first)
        self._usage["before"] = stack.parts()
        await _until(began + (first + BURST_LOOK_S if is_burst else (first + last) / 2))
        self._usage["memory"] = await asyncio.to_thread(stack.parts, memory=True)
        if not is_burst:  # of a burst the end is not known before
            await _until(began + last)
            self._usage["after"] = stack.parts()

    def _figures(self, probe: SpeedProbe) -> StageFigures:
        tallies = [client.tally for client in self._clients]
        load = self._stage.load
        first, last = window(load)
        elapsed_s = last - first
        if isinstance(load, Burst):
            elapsed_s = max(tally["last_answer_s"] for tally in tallies) or load.duration_s

        def total(name: str) -> int:
            return sum(tally[name] for tally in tallies)

        outcomes = Counter[str]()
        for tally in tallies:
            outcomes.update(tally["outcomes"])
        latencies = merged(tally["latencies"] for tally in tallies)
        refusals = merged(tally["refusal_latencies"] for tally in tallies)
        behind = merged(tally["behind"] for tally in tallies)
        numbers = range(max(len(client.ticks) for client in self._clients))
        figures = StageFigures(
            name=self._stage.name,
            target=self._addresses[0].kind,
            load=load.model_dump(),
            elapsed_s=elapsed_s,
            offered_per_s=total("due") / elapsed_s,
            goodput_per_s=total("good_in_window") / elapsed_s,
            due=total("due"),
            good=total("good"),
            wrong=total("wrong"),
            unjudged=sum(outcomes[name] for name in UNJUDGED),
            refused=total("refused"),
            lost=total("lost"),
            retried=total("retried"),
            redelivered=total("redelivered"),
            outcomes=dict(outcomes),
            latency_s=latencies.quantiles(SHARES),
            mean_s=latencies.mean_s,
            max_s=latencies.quantile_s(1.0),
            refusal_p99_s=refusals.quantile_s(0.99),
            client_behind_p99_s=behind.quantile_s(0.99),
            kinds=_kinds(tallies),
            slow=probe.slow,
            seconds=[self._second(number) for number in numbers],
            examples=[text for tally in tallies for text in tally["examples"]][:MAX_EXAMPLES],
            histogram=latencies.encoded(),
        )
        return _with_parts(figures, self._usage, sum(tally["cpu_s"] for tally in tallies))


def _kinds(tallies: list[dict[str, Any]]) -> dict[str, KindFigures]:
    sums: dict[str, Counter[str]] = {}
    for tally in tallies:
        for name, total in tally["kinds"].items():
            sums.setdefault(name, Counter()).update(total)
    return {
        name: KindFigures(
            runs=total["runs"],
            **{what: total[what] / total["runs"] for what in ("wall_ms", "cpu_ms", "queued_ms")},
        )
        for name, total in sorted(sums.items())
    }


def _with_parts(figures: StageFigures, used: dict[str, Parts], client_cpu_s: float) -> StageFigures:
    # The generator's CPU is of the whole load, warm-up too: its share of a run is estimated.
    answers = sum(s.good + s.wrong + s.unjudged + s.refused + s.lost for s in figures.seconds)
    cpu_ms = {"client": client_cpu_s / max(1, answers) * 1e3}
    if "before" not in used:
        return figures.model_copy(update={"cpu_ms_per_run": cpu_ms})
    before, memory, after = used["before"], used["memory"], used["after"]
    runs = max(1, round(figures.goodput_per_s * figures.elapsed_s))
    for part, cpu_s in after.cpu_s.items():
        cpu_ms[part] = (cpu_s - before.cpu_s.get(part, 0.0)) / runs * 1e3
    return figures.model_copy(
        update={"cpu_ms_per_run": cpu_ms, "pss_bytes": dict(memory.pss_bytes),
                "processes": dict(memory.processes)}
    )  # fmt: skip


async def _end(client: _Client) -> None:
    if not client.tally:
        # Not Process.kill(): that polls first, and asyncio then misses the exit status.
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.process.pid, signal.SIGKILL)
    await client.process.wait()


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
