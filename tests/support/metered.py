"""Gateway, queue and worker as three real processes, and what their metrics say."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from gateway_pool import GatewayProcess, gateway
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rollyard_queue.embedded import EmbeddedServer

START_WITHIN_S = 60.0


@dataclass
class Exposition:
    """One scrape: families by their names, which for counters lack ``_total``."""

    families: dict[str, Metric] = field(default_factory=dict[str, Metric])

    def value(self, name: str, **labels: str) -> float:
        """One sample's value.

        Raises:
            KeyError: there is none.
        """
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise KeyError(name, labels)

    def labels(self) -> dict[str, set[str]]:
        """Documented name (counters with ``_total``) to the labels met; ``le`` left out."""
        found: dict[str, set[str]] = {}
        for name, family in self.families.items():
            shown = f"{name}_total" if family.type == "counter" else name
            found[shown] = {label for one in family.samples for label in one.labels} - {"le"}
        return found


@dataclass
class Metered:
    """The addresses of a running service's two endpoints."""

    gateway: GatewayProcess
    worker_address: str
    worker_pid: int

    async def scrape(self) -> tuple[Exposition, Exposition]:
        """What the gateway and the worker expose now."""
        async with httpx2.AsyncClient(timeout=30) as http:
            answers = [
                await http.get(f"{address}/metrics")
                for address in (self.gateway.address, self.worker_address)
            ]
        pages: list[Exposition] = []
        for answer in answers:
            assert answer.status_code == 200
            families = text_string_to_metric_families(answer.text)
            pages.append(Exposition({family.name: family for family in families}))
        return pages[0], pages[1]


@asynccontextmanager
async def metered(**settings: str) -> AsyncGenerator[Metered]:
    """Start all; at the end nothing is left, and the worker must have ended well."""
    own = {f"ROLLYARD_{name.upper()}": value for name, value in settings.items()}
    async with EmbeddedServer() as server, gateway(server.url) as front:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "rollyard_sandbox", "--slots", "4"),
            *("--templates", "bare", "--redis-url", server.url),
            env=os.environ | {"ROLLYARD_METRICS_PORT": "0"} | own,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        events: list[dict[str, Any]] = []
        reader = asyncio.create_task(_read(worker, events))
        try:
            async with asyncio.timeout(START_WITHIN_S):
                while not {"metrics.listening", "worker.ready"} <= {e["event"] for e in events}:
                    assert worker.returncode is None, events
                    await asyncio.sleep(0.01)
            [listening] = [event for event in events if event["event"] == "metrics.listening"]
            yield Metered(front, listening["address"], worker.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                worker.terminate()
            await worker.wait()
            await reader
        assert worker.returncode == 0, events


async def _read(process: asyncio.subprocess.Process, events: list[dict[str, Any]]) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
