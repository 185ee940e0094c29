"""What one run costs each part of a service on this machine, measured in about half a minute.

CPU is what /proc says of each part's processes, divided by the runs; a program's own CPU is what
its results say. All is measured with every core busy, for that is when a plan matters. Costs are
of this machine: on another, measure again (``rollyard plan --costs FILE`` keeps them apart).
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from statistics import mean, median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import rollyard
from rollyard.types import Limits
from rollyard_loadtest.costs_calls import Called, Calls
from rollyard_loadtest.figures import Machine
from rollyard_loadtest.machine import describe
from rollyard_loadtest.scenario import Scenario
from rollyard_loadtest.stack import Parts, Stack, StackOptions
from rollyard_loadtest.workload import AnyKind, Work, works

SCHEMA = 1
BATCH = 64
"""Runs in a request of the SDK."""
LIMITS_DRAWN = 200
_SLEEP_MS = 20.0
_LONG_S = 0.25  # programs that take longer are measured a few times only
_SLEEPERS = 24

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How long to measure, in seconds, and in runs."""

    warm_s: float = 2.0
    kind_s: float = 3.0
    kind_runs: int = 80
    """Each kind is measured for ``kind_s`` or so often, whichever is less."""
    mix_s: float = 5.0
    single_s: float = 2.0
    control_s: float = 3.0
    waiting_runs: int = 4000
    """So many wait at once when it is measured what one of them occupies."""


FULL = Effort()
QUICK = Effort(0.5, 0.5, 16, 1.0, 0.5, 0.5, 2000)
"""Rough figures in a third of the time, most of which is starting services."""


class CostsError(ValueError):
    """A costs file that cannot be used; the message says why."""


class KindCost(BaseModel):
    """One kind of programs. Lists have a value for each measured run, in milliseconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    share: float
    stopped: bool
    """Its programs are stopped at their time limit."""
    cpu_ms: list[float] = Field(min_length=1)
    """CPU of slot and program."""
    own_ms: list[float] = Field(min_length=1)
    """Of that, the program's."""
    sleep_ms: list[float] = Field(min_length=1)
    """What a program waited without computing; zeros for those that compute."""
    template: str
    request_bytes: float
    result_bytes: float


class PartCost(BaseModel):
    """CPU milliseconds a run of each part."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gateway_ms: float
    valkey_ms: float
    worker_ms: float
    client_ms: float


class MemoryCost(BaseModel):
    """Proportional set size in bytes, except where it says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gateway_bytes: float
    worker_bytes: float
    """The worker's own process."""
    templates_bytes: float
    """All templates with their first slots."""
    slot_bytes: dict[str, float]
    """One more slot of a template, with a small program in it."""
    waiting_valkey_bytes: float
    """One run that waits."""
    waiting_gateway_bytes: float


class Costs(BaseModel):
    """Everything that a plan needs to know of a machine and a mix."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA
    scenario: str
    machine: Machine
    kinds: list[KindCost] = Field(min_length=1)
    mixed: PartCost
    """With the mix itself, in the small batches that a few cores make."""
    batched: PartCost
    """Gateway and queue alone, in requests of 64 (``rollyard bench --null``); ``worker_ms`` is
    that of a worker that runs nothing."""
    crowding: float = Field(gt=0)
    """CPU of a program in the mix, with all slots at work, by its CPU when measured alone."""
    single: PartCost
    """One call at a time."""
    latency_ms: float
    """Median time of a ``print`` on the idle service, less all CPU that it costs: hops."""
    memory: MemoryCost

    @property
    def cpu_ms(self) -> float:
        """Mean CPU of slot and program, over the mix."""
        return sum(kind.share * mean(self.crowded_ms(kind)) for kind in self.kinds)

    def crowded_ms(self, kind: KindCost) -> list[float]:
        """CPU of slot and program in the mix; a time limit stays as long as it is."""
        factor = 1.0 if kind.stopped else self.crowding
        return [value * factor for value in kind.cpu_ms]


def load_costs(path: Path, scenario: Scenario) -> Costs:
    """Read measured costs.

    Raises:
        CostsError: the file is malformed, or of another mix.
    """
    try:
        costs = Costs.model_validate_json(path.read_text())
    except OSError as error:
        raise CostsError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise CostsError(
            f"{path}: not a costs file of this version ({error.error_count()} fields are wrong or"
            " missing); name another file, or delete it to measure again"
        ) from None
    if {k.name: k.share for k in costs.kinds} != scenario.shares():
        raise CostsError(
            f"{path} was measured for {costs.scenario!r}, with other programs than"
            f" {scenario.name!r} has; name another file, or delete it to measure again"
        )
    return costs


def measure(
    scenario: Scenario, *, slots: int | None = None, effort: Effort = FULL, say: Progress
) -> Costs:
    """Start a service on this machine, measure, stop it.

    Raises:
        NotReady: it does not start. WrongAnswer: it does not work.
    """
    say("starting a service")
    with Stack(StackOptions(slots=slots)) as stack:
        measured = asyncio.run(_real(stack, scenario, effort, say))
    say("gateway and queue alone")
    with Stack(StackOptions(null=True)) as stack:
        batched = asyncio.run(_control(stack, effort))
    with Stack(StackOptions(null=True, null_service_ms=1000)) as stack:
        waiting = asyncio.run(_waiting(stack, effort))
    memory = MemoryCost.model_validate({**measured.memory, **waiting})
    return Costs(
        scenario=scenario.name, machine=describe(), kinds=measured.kinds, mixed=measured.mixed,
        crowding=measured.crowding, single=measured.single, batched=batched,
        latency_ms=measured.latency_ms, memory=memory,
    )  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    """What the service with a sandbox tells."""

    kinds: list[KindCost]
    mixed: PartCost
    crowding: float
    single: PartCost
    latency_ms: float
    memory: dict[str, Any]


class _Meter:
    """CPU of each part between two moments, a run."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._before, self._own_s = stack.parts(), time.process_time()

    def per_run_ms(self, runs: int) -> dict[str, float]:
        after, own_s = self._stack.parts(), time.process_time() - self._own_s
        spent = {name: after.cpu_s[name] - self._before.cpu_s[name] for name in after.cpu_s}
        return {name: value / runs * 1e3 for name, value in {**spent, "client": own_s}.items()}


async def _real(stack: Stack, scenario: Scenario, effort: Effort, say: Progress) -> _Measured:
    cores = describe().cores
    async with rollyard.AsyncClient(stack.addresses[0]) as client:
        mix = scenario.works("costs")
        await Calls(client, mix).closed(
            2 * cores, for_s=effort.warm_s
        )  # warm: templates, slots, pages
        idle = stack.parts(memory=True)
        kinds: list[KindCost] = []
        by_name: dict[str, list[AnyKind]] = {}
        for kind in scenario.programs:
            by_name.setdefault(kind.name, []).append(kind)
        for number, (name, members) in enumerate(by_name.items(), 1):
            say(f"programs of kind {name} ({number} of {len(by_name)})")
            share = scenario.shares()[name]
            kinds.append(
                await _kind(stack, client, name, share, works(members, "costs"), cores, effort)
            )
        say("the mix")
        meter = _Meter(stack)
        called = await Calls(client, mix).closed(
            mixed_in_flight(scenario, cores), for_s=effort.mix_s
        )
        mixed = _part_cost(meter.per_run_ms(len(called)))
        say("one call at a time")
        single, latency_ms = await _single(stack, client, effort)
        say("memory")
        slot_bytes = await _slot_bytes(stack, client, {kind.template for kind in kinds})
    memory: dict[str, Any] = {
        "gateway_bytes": idle.pss_bytes["gateway"],
        "worker_bytes": idle.pss_bytes["worker"],
        "templates_bytes": idle.pss_bytes["slots"],
        "slot_bytes": slot_bytes,
    }
    return _Measured(kinds, mixed, _crowding(kinds, called), single, latency_ms, memory)


def _crowding(kinds: list[KindCost], called: list[Called]) -> float:
    """Slots and caches are shared: what programs used more than each kind alone."""
    alone = {kind.name: mean(kind.own_ms) for kind in kinds if not kind.stopped}
    own = [(one.result.cpu_ms, alone[one.kind]) for one in called if one.kind in alone]
    if not own:
        return 1.0
    return max(1.0, sum(used for used, _ in own) / max(1e-6, sum(one for _, one in own)))


def mixed_in_flight(scenario: Scenario, cores: int) -> int:
    """Calls in flight when the mix is measured: the scenario's own, or 32 for each core."""
    load = scenario.load
    return min(load.in_flight, 32 * cores) if load.arrivals == "closed" else 32 * cores


async def _kind(
    stack: Stack, client: rollyard.AsyncClient, name: str, share: float,
    programs: Iterator[Work], cores: int, effort: Effort,
) -> KindCost:  # fmt: skip
    sizes: list[int] = []

    def watched() -> Iterator[Work]:
        for work in programs:
            sizes.append(len(rollyard.RunRequest.model_validate(work.request()).model_dump_json()))
            yield work

    calls = Calls(client, watched())
    [first] = await calls.closed(1, for_s=60, at_most=1)
    at_most = 4 * cores if first.latency_s > _LONG_S else effort.kind_runs
    meter = _Meter(stack)
    called = await calls.closed(cores, for_s=effort.kind_s, at_most=at_most)
    own = [one.result.cpu_ms for one in called]
    beside_ms = max(0.0, meter.per_run_ms(len(called))["slots"] - mean(own))
    stopped = first.result.outcome == "timeout"
    if stopped:
        # What they compute is their limit, and less only where they had to wait for a core.
        limits = [
            work.limits.get("timeout_s", Limits().timeout_s)
            for work in islice(programs, LIMITS_DRAWN)
        ]
        own = [round(limit_s * 1e3, 3) for limit_s in limits]
    return KindCost(
        name=name,
        share=share,
        stopped=stopped,
        cpu_ms=[round(value + beside_ms, 3) for value in own],
        own_ms=own,
        sleep_ms=[0.0] if stopped else _sleep_ms(called),
        template=first.result.template,
        request_bytes=mean(sizes),
        result_bytes=mean(len(one.result.model_dump_json()) for one in called),
    )


def _sleep_ms(called: list[Called]) -> list[float]:
    """What programs waited without computing, as far as it was not for a core that others had.

    Where the scenario knows what a program takes, that is its CPU and its sleep; else wall clock
    that is mostly not CPU, and in hardly any run short, is taken for sleep.
    """
    own = [one.result.cpu_ms for one in called]
    nominal = [one.nominal_s * 1e3 for one in called]
    walls = nominal if min(nominal) > 0 else [one.result.wall_ms for one in called]
    waits = [round(max(0.0, wall - cpu), 3) for wall, cpu in zip(walls, own, strict=True)]
    if sorted(waits)[len(waits) // 20] < _SLEEP_MS or median(own) > 0.3 * median(walls):
        return [0.0]
    return waits


async def _single(
    stack: Stack, client: rollyard.AsyncClient, effort: Effort
) -> tuple[PartCost, float]:
    """One call after the other: CPU of the parts, and what of the latency is not CPU."""
    meter = _Meter(stack)
    called = await Calls(client, _small()).closed(1, for_s=effort.single_s)
    spent_ms = meter.per_run_ms(len(called))
    latency_ms = median(one.latency_s for one in called) * 1e3 - sum(spent_ms.values())
    return _part_cost(spent_ms), round(max(0.0, latency_ms), 3)


async def _slot_bytes(
    stack: Stack, client: rollyard.AsyncClient, templates: set[str]
) -> dict[str, float]:
    """PSS that one more slot adds, by template; a sleeping program in each."""
    found: dict[str, float] = {}
    for template in sorted(templates):
        sleeping = {"code": "import time; time.sleep(1)", "template": template}
        before = stack.parts(memory=True)
        running = asyncio.create_task(client.run_all([sleeping] * _SLEEPERS))
        most = before
        while not running.done():
            await asyncio.wait([running], timeout=0.1)
            now = stack.parts(memory=True)
            most = max(most, now, key=lambda parts: parts.processes["slots"])
        await running
        found[template] = _added_bytes(before, most)
    return found


def _added_bytes(before: Parts, after: Parts) -> float:
    # Two processes a slot, its PID 1 and the program; slots that existed had one already.
    grown = after.pss_bytes["slots"] - before.pss_bytes["slots"]
    return max(0.0, grown / _SLEEPERS)


def _part_cost(spent_ms: dict[str, float]) -> PartCost:
    return PartCost(
        gateway_ms=spent_ms["gateway"], valkey_ms=spent_ms["valkey"],
        worker_ms=spent_ms["worker"], client_ms=spent_ms["client"],
    )  # fmt: skip


async def _control(stack: Stack, effort: Effort) -> PartCost:
    """CPU a run in requests of 64."""
    async with rollyard.AsyncClient(stack.addresses[0]) as client:
        calls = Calls(client, _small())
        await calls.burst(4 * BATCH)
        meter = _Meter(stack)
        done = 0
        began = time.monotonic()
        while time.monotonic() - began < effort.control_s:
            done += len(await calls.burst(16 * BATCH))
        return _part_cost(meter.per_run_ms(done))


async def _waiting(stack: Stack, effort: Effort) -> dict[str, float]:
    """What gateway and Valkey hold for each run that waits, in bytes of memory."""
    async with rollyard.AsyncClient(stack.addresses[0]) as client:
        calls = Calls(client, _small())
        await calls.burst(4 * BATCH)
        before = stack.parts(memory=True).pss_bytes
        most = before.copy()
        running = asyncio.create_task(calls.burst(effort.waiting_runs))
        while not running.done():
            await asyncio.wait([running], timeout=0.05)
            most |= stack.parts(memory=True).pss_bytes
        await running
    return {
        f"waiting_{name}_bytes": (most[name] - before[name]) / effort.waiting_runs
        for name in ("gateway", "valkey")
    }


def _small() -> Iterator[Work]:
    return (Work("print", f"print({n})", stdout=f"{n}\n") for n in count())
