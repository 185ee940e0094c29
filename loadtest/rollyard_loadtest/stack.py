"""The service under test: one that the bench starts on this machine, or one of the user's."""

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from rollyard import AsyncClient
from rollyard._up import Plan
from rollyard.errors import ServiceStartError
from rollyard.local import STOP_TIMEOUT_S, LocalService
from rollyard_loadtest.processes import Usage, descendants, usage


class NotReady(Exception):
    """There is no service to put a load on; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What to start."""

    slots: int | None = None
    gateways: int = 1
    null: bool = False
    null_service_ms: float = 0.0
    cores: int | None = None
    """Confine everything that is started, and the load generator, to so many cores."""
    allow_degraded: bool = False


class Stack:
    """A whole local service, by part. Use once, with ``with``."""

    def __init__(self, options: StackOptions) -> None:
        plan = Plan(
            slots=options.slots,
            gateways=options.gateways,
            null_for_benchmarks=options.null,
            null_service_ms=options.null_service_ms,
            allow_degraded=options.allow_degraded,
            stop_timeout_s=STOP_TIMEOUT_S,
            sealed=True,
        )
        self._options = options
        self._service = LocalService(plan)
        self._affinity: set[int] = set()

    @property
    def addresses(self) -> list[str]:
        """Of the gateways."""
        return self._service.addresses

    def __enter__(self) -> Self:
        """Start it.

        Raises:
            NotReady: it does not start.
        """
        self._affinity = os.sched_getaffinity(0)
        if self._options.cores is not None:
            if self._options.cores > len(self._affinity):
                raise NotReady(f"--cores {self._options.cores}: there are {len(self._affinity)}")
            os.sched_setaffinity(0, sorted(self._affinity)[: self._options.cores])
        try:
            self._service.start()
        except ServiceStartError as error:
            raise NotReady(f"the local service does not start: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._affinity)
        self._service.stop()

    def parts(self, *, memory: bool = False) -> "Parts":
        """CPU and, if asked for, memory of each part so far."""
        found = Parts()
        for name, pid in self._service.pids.items():
            kind = name.split("-")[0]
            if kind == "worker":
                found.add("worker", usage([pid], memory=memory))
                found.add("slots", usage(descendants(pid)[1:], memory=memory))
            elif kind in ("gateway", "valkey"):
                found.add(kind, usage([pid], memory=memory))
        return found


@dataclass
class Parts:
    """Sums by part."""

    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    pss_bytes: Counter[str] = field(default_factory=Counter[str])
    processes: Counter[str] = field(default_factory=Counter[str])

    def add(self, part: str, used: Usage) -> None:
        self.cpu_s[part] = self.cpu_s.get(part, 0.0) + used.cpu_s
        self.pss_bytes[part] += used.pss_bytes
        self.processes[part] += used.processes


async def require_ready(url: str) -> None:
    """Raise NotReady unless a Rollyard gateway at ``url`` takes runs."""
    async with AsyncClient(url, max_retries=2) as client:
        if not await client.ready():
            raise NotReady(
                f"no Rollyard gateway takes runs at {url}: is it up (`rollyard up`), and the URL "
                "right? Without --url the bench starts a service of its own."
            )
