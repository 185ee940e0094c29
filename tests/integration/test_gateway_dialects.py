"""What the dialects' clients hear when the service is busy or away: what they try again on."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from gateway_pool import PlayWorker, pool, until

from rollyard.types import RunResult
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import FinishedRun, QueuedRun
from rollyard_queue.redis import RedisQueue
from rollyard_service.app import create_app
from rollyard_service.dialects import codejudge, sandboxfusion
from rollyard_service.settings import GatewaySettings

BATCH = {
    "type": "batch",
    "submissions": [{"type": "python", "solution": f"echo {i}"} for i in range(3)],
}
ONE = {"type": "python", "solution": "echo"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def server(anyio_backend: str) -> AsyncGenerator[EmbeddedServer]:
    async with EmbeddedServer() as one:
        yield one


@asynccontextmanager
async def serving(
    server: EmbeddedServer, *, max_queued: int = 1000, **settings: Any
) -> AsyncGenerator[httpx2.AsyncClient]:
    """The application in this process, so that a test can shorten its waits."""
    queue = RedisQueue.from_url(server.url, name="dialects", max_queued=max_queued)
    app = create_app(GatewaySettings(**settings), queue)
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def reasons(client: httpx2.AsyncClient, path: str) -> set[str]:
    answer = await client.post(path, json=BATCH)
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert len(results) == 3
    return {result["reason"] for result in results}


async def test_full_queue(server: EmbeddedServer) -> None:
    async with serving(server, max_queued=1) as client:
        queue = RedisQueue.from_url(server.url, name="dialects")
        await queue.submit([QueuedRun("filler", b"{}")], reply_to="nobody")
        answer = await client.post("/run_code", json={"code": "echo"})
        assert answer.status_code == 504
        assert answer.headers["retry-after"] == "1"
        assert (await client.post("/run_jupyter", json={"cells": ["1"]})).status_code == 504
        assert (await client.post("/execute", json={"code": "1"})).status_code == 503
        assert (await client.post("/run", json=ONE)).json()["reason"] == "queue_timeout"
        assert await reasons(client, "/run/long-batch") == {"queue_timeout"}
        await queue.cancel(["filler"])
        await queue.close()


async def test_no_worker_in_time(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxfusion, "START_WITHIN_S", 0.05)
    monkeypatch.setattr(codejudge, "QUEUE_LIFE_S", 0.05)
    monkeypatch.setattr(codejudge, "LONG_QUEUE_LIFE_S", 0.05)
    async with serving(server) as client:
        answer = await client.post("/run_code", json={"code": "echo"})
        assert answer.status_code == 504
        assert "no worker" in answer.json()["message"]
        assert await reasons(client, "/judge/long-batch") == {"queue_timeout"}


async def test_answers_that_are_there_are_kept(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch that is only partly run in time, the rest alone has to be sent again."""
    monkeypatch.setattr(codejudge, "LONG_QUEUE_LIFE_S", 0.5)
    queue = RedisQueue.from_url(server.url, name="dialects")
    async with serving(server) as client, PlayWorker(queue) as worker:
        worker.only = 2
        answer = await client.post("/run/long-batch", json=BATCH)
        results = answer.json()["results"]
        assert sorted(result["reason"] for result in results) == ["", "", "queue_timeout"]
    await queue.close()


async def test_our_fault_is_never_the_program_s(server: EmbeddedServer) -> None:
    """A worker that fails: 200 SandboxError with a message, queue_timeout, 503."""
    queue = RedisQueue.from_url(server.url, name="dialects")

    async def failed(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        call = asyncio.create_task(client.post(path, json=body))
        while not (deliveries := await queue.claim("faulty", max_runs=10, lease_s=30)):
            await asyncio.sleep(0.01)
        await queue.finish("faulty", [
            FinishedRun(one.run_id, one.attempt, RunResult(
                run_id=one.run_id, outcome="infra_error", message="the jail fell down",
            ).model_dump_json().encode())
            for one in deliveries
        ])  # fmt: skip
        return await call

    async with serving(server) as client:
        for path, body in (("/run_code", {"code": "1"}), ("/run_jupyter", {"cells": ["1"]})):
            answer = await failed(client, path, body)
            assert (answer.status_code, answer.json()["status"]) == (200, "SandboxError")
            assert "the jail fell down" in answer.json()["message"]
            assert answer.json().get("run_result") is None
        answer = await failed(client, "/run", ONE)
        assert (answer.status_code, answer.json()["reason"]) == (200, "queue_timeout")
        assert not answer.json()["run_success"]
        answer = await failed(client, "/run/long-batch", BATCH)
        assert {one["reason"] for one in answer.json()["results"]} == {"queue_timeout"}
        answer = await failed(client, "/execute", {"code": "1"})
        assert answer.status_code == 503
    await queue.close()


async def test_too_many_bytes_in_flight_are_busy_too(server: EmbeddedServer) -> None:
    """Refused before the body is read, in the words on which each dialect's clients try again."""
    async with serving(server, max_held_bytes=1 << 20) as client:
        holding = asyncio.create_task(client.post("/run_code", json={"code": "#" * 900_000}))
        stats = RedisQueue.from_url(server.url, name="dialects")
        while not (await stats.stats()).queued:
            await asyncio.sleep(0.01)
        for path, field, status in (
            ("/run_code", "code", 504),
            ("/execute", "code", 503),
            ("/run", "solution", 503),  # rStar2's client repeats what is no answer
            ("/v1/runs", "code", 503),
        ):
            answer = await client.post(path, json={field: "#" * 900_000})
            assert answer.status_code == status, path
            assert int(answer.headers["retry-after"]) >= 1
        text = (await client.get("/metrics")).text
        assert 'rollyard_gateway_refusals_total{reason="busy"} 1.0' in text
        assert 'rollyard_gateway_refusals_total{reason="overloaded"} 3.0' in text
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await stats.close()


async def test_queue_away() -> None:
    async with EmbeddedServer() as server, serving(server) as client:
        await server.stop()
        assert (await client.post("/run_code", json={"code": "echo"})).status_code == 504
        assert await reasons(client, "/run/long-batch") == {"queue_timeout"}
        assert (await client.get("/status")).status_code == 503
        assert (await client.get("/ping")).status_code == 200


async def test_caller_that_hangs_up_has_its_batch_cancelled() -> None:
    runs = [{"type": "python", "solution": "hold"} for _ in range(150)]
    async with pool() as one, one.gateway.client() as client:
        call = asyncio.create_task(client.post("/run/long-batch", json={"submissions": runs}))
        await until(lambda: len(one.worker.started) == 150)
        call.cancel()
        await until(lambda: len(one.worker.cancelled) == 150)
        assert not one.worker.started


async def test_key_in_the_url(server: EmbeddedServer) -> None:
    """Their clients send no header of their choice, but take a URL with a password."""
    async with serving(server, api_keys="secret") as client:
        wrong = base64.b64encode(b"any:other").decode()
        right = base64.b64encode(b"any:secret").decode()
        for header, value, status in (
            ("authorization", f"Basic {wrong}", 401),
            ("authorization", "Basic %%%", 401),
            ("authorization", "Digest secret", 401),
            ("x-access-token", "other", 401),
            ("authorization", f"Basic {right}", 200),
            ("authorization", "Bearer secret", 200),
            ("x-access-token", "secret", 200),
        ):
            answer = await client.get("/v1/ping", headers={header: value})
            assert answer.status_code == status, (header, value)
        assert (await client.get("/v1/ping")).status_code == 401
