"""A service whose parts are processes of ours, so that each can be killed, frozen and replaced.

Nothing starts a part again but whoever harmed it (``chaos_faults``): what a supervisor would do
is then done at a moment of our choosing. The embedded server runs as ``rollyard up`` runs it: in
memory, nothing on disk, so that killing it forgets everything that it held.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import rollyard
from rollyard._child import Child, python_module

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
START_S = 90.0
"""A part that is not ready by then has failed; on a full machine a template takes seconds."""
STOP_S = 40.0
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class StackPlan:
    """What to start. ``lease_s``: what a worker may stay silent before its runs go to others."""

    gateways: int = 2
    workers: int = 2
    slots: int = 8
    shards: int = 1
    """Parts of the queue, all on the one server."""
    lease_s: float = 5.0
    templates: tuple[str, ...] = ("bare", "science")


class Part:
    """One process of the service, started again under the same name after each of its ends.

    Only one fault at a time harms it: take ``lock`` first.
    """

    def __init__(
        self, name: str, command: list[str], env: Mapping[str, str], ready: str, place: Path
    ) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.pids: list[int] = []
        """Of all its lives."""
        self.said: Counter[str] = Counter()
        """How often it logged each event, over all its lives."""
        self.tracebacks: list[str] = []
        self._ready_event = ready
        self._ready = asyncio.Event()
        self._file = (place / f"{name}.log").open("a")
        self._child = Child(name, command, log=self._line, env=env)

    @property
    def kind(self) -> str:
        """``worker``, ``gateway`` or ``server``."""
        return self.name.partition("-")[0]

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running

    async def start(self) -> None:
        """Start it and return when it says that it serves.

        Raises:
            RuntimeError: it ended instead, or said nothing for 90 s; with its last lines.
        """
        self._ready.clear()
        await self._child.start()
        self.pids.append(self._child.pid)
        ready = asyncio.create_task(self._ready.wait())
        ended = asyncio.create_task(self._child.wait())
        await asyncio.wait({ready, ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        ok = ready.done()
        for task in (ready, ended):
            task.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)
        if not ok:
            raise RuntimeError(f"{self.name} did not start:\n" + "\n".join(self._child.tail))

    def send(self, number: signal.Signals) -> None:
        """Signal the process itself, not its group: what it started must notice by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait until it has ended; its exit code, negative for a signal."""
        return await self._child.wait()

    async def stop(self) -> bool:
        """Ask it to stop; False when it had to be killed."""
        if not self.running:
            return True
        self.send(signal.SIGCONT)
        return await self._child.stop(timeout_s=STOP_S)

    def close(self) -> None:
        """Kill what is left of it."""
        self._child.kill()
        self._file.close()

    def _line(self, _name: str, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()
        event = ""
        with contextlib.suppress(ValueError, AttributeError):
            event = str(json.loads(line).get("event", ""))
        self.said[event] += 1
        if '"exception":' in line or line.startswith("Traceback"):
            self.tracebacks.append(f"{self.name}: {line[-600:]}")
        if self._ready_event and self._ready_event in (event or line):
            self._ready.set()


@dataclass
class Stack:
    """All parts. Enter it with ``async with``; on leaving, everything of it has ended."""

    plan: StackPlan
    directory: Path
    server: Part = field(init=False)
    gateways: list[Part] = field(init=False)
    workers: list[Part] = field(init=False)
    stopped_well: dict[str, bool] = field(default_factory=dict[str, bool])
    """Once stopped: which parts stopped when asked to."""

    def __post_init__(self) -> None:
        socket = self.directory / "valkey.sock"
        kept = ("ROLLYARD_STATE_DIR",)
        env = {n: v for n, v in os.environ.items() if not n.startswith("ROLLYARD_") or n in kept}
        env |= {
            "ROLLYARD_REDIS_URL": f"unix://{socket}",
            "ROLLYARD_SLOTS": str(self.plan.slots),
            "ROLLYARD_SHARDS": str(self.plan.shards),
            "ROLLYARD_LEASE_S": str(self.plan.lease_s),
            "ROLLYARD_DRAIN_S": "10",
            "ROLLYARD_SHUTDOWN_GRACE_S": "10",
            "ROLLYARD_TEMPLATES": ",".join(self.plan.templates),
            # What a killed part leaves lies where it can be found.
            "TMPDIR": str(self.directory),
        }

        def part(name: str, ready: str, module: str, *arguments: str) -> Part:
            return Part(name, python_module(module, *arguments), env, ready, self.directory)

        self.server = part(
            "server", "accept connections", "rollyard_queue", "--socket", str(socket)
        )
        self.gateways = [
            part(
                f"gateway-{n}", "gateway.listening", "rollyard_service",
                "--uds", str(self._gateway_socket(n)),
            )
            for n in range(self.plan.gateways)
        ]  # fmt: skip
        self.workers = [
            part(f"worker-{n}", "worker.ready", "rollyard_sandbox")
            for n in range(self.plan.workers)
        ]

    @property
    def parts(self) -> list[Part]:
        return [self.server, *self.gateways, *self.workers]

    @property
    def server_socket(self) -> Path:
        return self.directory / "valkey.sock"

    def _gateway_socket(self, number: int) -> Path:
        return self.directory / f"gw{number}.sock"

    @property
    def addresses(self) -> list[str]:
        """Of the gateways, for ``rollyard.AsyncClient``."""
        return [f"unix://{self._gateway_socket(n)}" for n in range(self.plan.gateways)]

    async def __aenter__(self) -> "Stack":
        # Orphans of a killed part become ours, so that none can hide.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            await self.server.start()
            await asyncio.gather(*(gateway.start() for gateway in self.gateways))
            await asyncio.gather(*(worker.start() for worker in self.workers))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for group in (self.gateways, self.workers, [self.server]):
                well = await asyncio.gather(*(part.stop() for part in group))
                self.stopped_well |= {part.name: one for part, one in zip(group, well, strict=True)}
        finally:
            for part in self.parts:
                part.close()

    async def recovered(self, within_s: float) -> str:
        """Wait until every part serves again; what is missing after ``within_s``, or ""."""
        deadline = asyncio.get_running_loop().time() + within_s
        missing = "not looked at"
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(rollyard.AsyncClient(address, max_retries=0))
                for address in self.addresses
            ]
            while missing and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_LOOK_S)
                missing = await self._missing(clients)
        return missing

    async def _missing(self, clients: list[rollyard.AsyncClient]) -> str:
        for number, client in enumerate(clients):
            if not await client.ready():
                return f"gateway-{number} is not ready"
            try:
                workers = int((await client.stats())["workers"])
            except rollyard.RollyardError as error:
                return f"gateway-{number}: {error}"
            # One that was killed counts until its announcement ends.
            if workers != self.plan.workers:
                return f"gateway-{number} counts {workers} workers of {self.plan.workers}"
        return ""
