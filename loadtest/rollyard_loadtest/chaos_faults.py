"""Which part is harmed when, and how: drawn from a seed, then done."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from rollyard_loadtest.chaos_stack import Part, Stack

FaultKind = Literal[
    "kill worker",
    "freeze worker",
    "pause worker",
    "roll worker",
    "kill gateway",
    "freeze gateway",
    "roll gateway",
    "kill server",
    "freeze server",
]

KINDS: dict[FaultKind, int] = {
    "kill worker": 3, "freeze worker": 2, "pause worker": 2, "roll worker": 1,
    "kill gateway": 2, "freeze gateway": 1, "roll gateway": 1,
    "kill server": 1, "freeze server": 1,
}  # fmt: skip
"""How often each comes in one round; every kind comes before any comes again out of turn.

kill: SIGKILL, started again up to 2 s later. freeze: SIGSTOP, for a worker longer than its lease,
else up to one and a half leases. pause: SIGSTOP for less than a lease. roll: SIGTERM, then a
successor, as a deployment does.
"""

_BREATH_S = 1.0  # of a part between two faults; else a slow machine never serves

LOSES_LEASES: frozenset[FaultKind] = frozenset(
    {"kill worker", "freeze worker", "freeze server", "pause worker"}
)
"""After these a run may be delivered again and its loss counted; a rolled worker hands back, and
a server that is killed forgets the count. A pause counts too: with a heartbeat just missed before
it, even a short one can pass the lease."""


@dataclass(frozen=True)
class Fault:
    """One planned fault. ``target`` chooses among the parts of its kind; ``for_s`` how long."""

    at_s: float
    kind: FaultKind
    target: int
    for_s: float


@dataclass(frozen=True)
class Done:
    """What really happened, in seconds of the run; ``until_s``: the part serves again."""

    kind: FaultKind
    part: str
    from_s: float
    until_s: float


def draw_faults(*, until_s: float, every_s: float, lease_s: float, seed: int) -> list[Fault]:
    """A schedule: the same for the same arguments. Gaps are random, ``every_s`` on average."""
    chance = random.Random(f"faults-{seed}")  # noqa: S311 - not for secrets
    kinds = _endless(chance)
    faults: list[Fault] = []
    at_s = every_s * chance.uniform(0.5, 1.0)
    while at_s < until_s:
        kind = next(kinds)
        if kind == "freeze worker":
            for_s = lease_s * chance.uniform(1.3, 2.0)
        elif kind.startswith("freeze"):
            for_s = lease_s * chance.uniform(0.3, 1.5)
        elif kind == "pause worker":
            for_s = lease_s * chance.uniform(0.1, 0.5)
        else:
            for_s = chance.uniform(0.0, 2.0)
        faults.append(Fault(round(at_s, 3), kind, chance.randrange(1 << 16), round(for_s, 3)))
        at_s += every_s * chance.uniform(0.4, 1.6)
    return faults


def _endless(chance: random.Random) -> Iterator[FaultKind]:
    while True:
        once: list[FaultKind] = list(KINDS)
        again: list[FaultKind] = [k for k, count in KINDS.items() for _ in range(count - 1)]
        for batch in (once, again):
            chance.shuffle(batch)
            yield from batch


@dataclass
class Tormentor:
    """Does the planned faults to a stack; ``done`` tells what came of them."""

    stack: Stack
    faults: list[Fault]
    now_s: Callable[[], float]
    done: list[Done] = field(default_factory=list[Done])
    _killed_s: list[float] = field(default_factory=list[float])

    def forgotten(self, since_s: float) -> bool:
        """Was the server killed, and with it all that it knew, since then?"""
        return any(killed_s >= since_s for killed_s in self._killed_s)

    async def run(self) -> None:
        """Return when the last fault is over and its part serves again.

        Raises:
            RuntimeError: a part did not come back.
        """
        async with asyncio.TaskGroup() as tasks:
            for fault in self.faults:
                await asyncio.sleep(max(0.0, fault.at_s - self.now_s()))
                tasks.create_task(self._do(fault))

    async def _do(self, fault: Fault) -> None:
        part = self._part(fault)
        how: dict[str, Callable[[Part, float], Awaitable[None]]] = {
            "kill": self._kill, "freeze": self._freeze, "pause": self._freeze, "roll": self._roll,
        }  # fmt: skip
        async with part.lock:
            from_s = self.now_s()
            await how[fault.kind.split()[0]](part, fault.for_s)
            self.done.append(Done(fault.kind, part.name, from_s, self.now_s()))
            await asyncio.sleep(_BREATH_S)

    def _part(self, fault: Fault) -> Part:
        kind = fault.kind.split()[1]
        parts = [part for part in self.stack.parts if part.kind == kind]
        # Rather one that is well: two faults on one part merely queue up.
        well = [part for part in parts if not part.lock.locked()] or parts
        return well[fault.target % len(well)]

    async def _kill(self, part: Part, for_s: float) -> None:
        if part is self.stack.server:
            self._killed_s.append(self.now_s())
        part.send(signal.SIGKILL)
        await part.ended()
        await asyncio.sleep(for_s)
        await part.start()

    async def _freeze(self, part: Part, for_s: float) -> None:
        part.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            part.send(signal.SIGCONT)

    async def _roll(self, part: Part, for_s: float) -> None:
        if not await part.stop():
            raise RuntimeError(f"{part.name} did not stop when asked to")
        await asyncio.sleep(for_s)
        await part.start()
