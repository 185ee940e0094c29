"""A real gateway process in front of a real Valkey, and a worker that plays the sandbox.

The worker claims from the real queue and finishes with real result JSON. What a program does is
its code: ``echo …`` ends at once with itself as stdout, ``hold …`` runs until the test lets go.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx2
import msgspec

from rollyard.types import RunResult
from rollyard_queue.base import QueueUnavailable
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import Delivery, FinishedRun, RunSpec
from rollyard_queue.redis import RedisQueue

WITHIN_S = 20.0
"""A condition that is not met after this has failed; met, it costs its own time only."""
LEASE_S = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that another task, or another process, brings about."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.005)


class PlayWorker:
    """Claims runs, and finishes each by what its code says."""

    def __init__(self, queue: RedisQueue, worker_id: str = "play-1") -> None:
        self.queue = queue
        self.worker_id = worker_id
        self.started: dict[str, Delivery] = {}
        self.specs: dict[str, RunSpec] = {}
        self.starts: list[str] = []
        self.cancelled: set[str] = set()
        self.only: int | None = None
        """Take this many runs and no more; None: all."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def let_go(self, *run_ids: str) -> None:
        """Finish held runs."""
        await until(lambda: all(run_id in self.started for run_id in run_ids))
        await self._finish([self.started.pop(run_id) for run_id in run_ids])

    async def _serve(self) -> None:
        while True:
            try:
                await self._step()
            except QueueUnavailable:
                await asyncio.sleep(0.02)

    async def _step(self) -> None:
        wanted = 512 if self.only is None else self.only
        deliveries = (
            await self.queue.claim(self.worker_id, max_runs=wanted, lease_s=LEASE_S)
            if wanted
            else []
        )
        if self.only is not None:
            self.only -= len(deliveries)
        at_once: list[Delivery] = []
        for delivery in deliveries:
            spec = msgspec.json.decode(delivery.payload, type=RunSpec)
            assert spec.run_id == delivery.run_id
            self.starts.append(spec.run_id)
            self.specs[spec.run_id] = spec
            if spec.code.startswith("hold"):
                self.started[spec.run_id] = delivery
            else:
                at_once.append(delivery)
        await self._finish(at_once)
        if not deliveries:
            notice = await self.queue.wait(self.worker_id, for_work=True, wait_s=0.5)
            for run_id in notice.cancelled:
                self.cancelled.add(run_id)
                self.started.pop(run_id, None)

    async def _finish(self, deliveries: list[Delivery]) -> None:
        await self.queue.finish(
            self.worker_id,
            [FinishedRun(one.run_id, one.attempt, self._result(one)) for one in deliveries],
        )

    def _result(self, delivery: Delivery) -> bytes:
        result = RunResult(
            run_id=delivery.run_id,
            outcome="ok",
            exit_code=0,
            stdout=self.specs[delivery.run_id].code,
            wall_ms=1.0,
            queued_ms=delivery.queued_ms,
            attempt=delivery.attempt,
            worker_id=self.worker_id,
        )
        return result.model_dump_json().encode()


@dataclass
class GatewayProcess:
    """``python -m rollyard_service`` on a free loopback port."""

    process: asyncio.subprocess.Process
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    address: str = ""

    def client(self, **options: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.address, timeout=60, **options)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            try:
                event = json.loads(line)
            except ValueError:  # what it says before logging is set up, and faults
                event = {"event": line.decode(), "level": "text"}
            self.events.append(event)
            if event["event"] == "gateway.listening":
                self.address = event["address"]


@asynccontextmanager
async def gateway(
    redis_url: str, *flags: str, **settings: object
) -> AsyncGenerator[GatewayProcess]:
    """Start a gateway; stop it at the end, and fail if it did not end well."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ROLLYARD_")
    }
    environment |= {f"ROLLYARD_{name.upper()}": str(value) for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard_service", "--port", "0", "--redis-url", redis_url),
        *flags,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    one = GatewayProcess(process)
    reader = asyncio.create_task(one._read())  # pyright: ignore[reportPrivateUsage]
    try:
        await until(lambda: one.address or process.returncode is not None)
        assert one.address, f"the gateway did not start: {one.events}"
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            one.terminate()
        try:
            await asyncio.wait_for(process.wait(), WITHIN_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        await reader
    assert process.returncode == 0, one.events
    faults = [event for event in one.events if event["level"] in ("error", "critical")]
    assert not faults, faults


@dataclass
class Pool:
    """Everything of a service but the sandbox."""

    server: EmbeddedServer
    queue: RedisQueue
    worker: PlayWorker
    gateway: GatewayProcess


@asynccontextmanager
async def pool(**settings: object) -> AsyncGenerator[Pool]:
    """Valkey, a worker and a gateway; all are gone at the end."""
    async with EmbeddedServer() as server:
        queue = RedisQueue.from_url(server.url)
        try:
            async with (
                PlayWorker(queue) as worker,
                gateway(server.url, **settings) as process,
            ):
                yield Pool(server, queue, worker, process)
        finally:
            await queue.close()
