"""What a gateway refuses before it reads, and what it says of a queue that takes nothing."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from gateway_pool import PlayWorker, gateway, pool, until

from rollyard.types import MIB, ErrorResponse
from rollyard_queue.connections import Server
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import QueuedRun
from rollyard_queue.redis import RedisQueue
from rollyard_sandbox.null import NullWorker

WITHIN_S = 20.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def queue_on(server: EmbeddedServer) -> AsyncGenerator[RedisQueue]:
    queue = RedisQueue.from_url(server.url)
    try:
        yield queue
    finally:
        await queue.close()


def fillers(count: int, payload: bytes = b"{}") -> list[QueuedRun]:
    return [QueuedRun(f"filler-{index}", payload) for index in range(count)]


async def refused(client: httpx2.AsyncClient, body: dict[str, Any], status: int) -> ErrorResponse:
    """Post until the answer has this status: what a gateway knows is a fraction of a second old."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            with contextlib.suppress(TimeoutError):  # it was admitted, and waits for a worker
                answer = await asyncio.wait_for(client.post("/v1/runs", json=body), 0.5)
                if answer.status_code == status:
                    assert int(answer.headers["retry-after"]) >= 1
                    return ErrorResponse.model_validate_json(answer.content)
                await asyncio.sleep(0.01)


async def test_full_queue_refuses_before_the_body_is_sent() -> None:
    async with (
        EmbeddedServer() as server,
        queue_on(server) as queue,
        gateway(server.url, max_queued=5) as process,
        process.client() as client,
    ):
        await queue.submit(fillers(5), reply_to="nobody")
        error = await refused(client, {"code": "x"}, 503)
        assert error.error == "overloaded"
        assert "5" in error.message
        async with asyncio.timeout(WITHIN_S):
            while True:  # not a byte of the body is ever sent
                reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
                writer.write(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n")
                try:
                    line = await asyncio.wait_for(reader.readline(), 0.5)
                except TimeoutError:
                    continue  # admitted: its look at the queue was older than the fillers
                finally:
                    writer.close()
                assert b" 503 " in line
                break
        await queue.cancel([run.run_id for run in fillers(5)])
        async with PlayWorker(queue), asyncio.timeout(WITHIN_S):
            while (await client.post("/v1/runs", json={"code": "echo"})).status_code != 200:
                await asyncio.sleep(0.01)


async def test_bytes_of_the_queue_count_before_the_body_is_sent() -> None:
    async with (
        EmbeddedServer() as server,
        queue_on(server) as queue,
        gateway(server.url, max_queued_bytes=10_000) as process,
        process.client() as client,
    ):
        await queue.submit(fillers(1, b"x" * 9_000), reply_to="nobody")
        error = await refused(client, {"code": "#" * 2_000}, 503)
        assert error.error == "overloaded"
        assert "10000" in error.message.replace(",", "")


async def test_a_job_with_its_share_is_429_and_others_are_served() -> None:
    async with pool(max_queued_per_job=2) as one, one.gateway.client() as client:
        one.worker.only = 0
        runs = [{"code": "echo", "job": "greedy"}] * 3
        answer = await client.post("/v1/batches", json={"runs": runs})
        error = ErrorResponse.model_validate_json(answer.content)
        assert (answer.status_code, error.error) == (429, "overloaded")
        assert "greedy" in error.message
        assert error.retry_after_s is not None
        one.worker.only = None
        answer = await client.post("/v1/batches", json={"runs": [{"code": "echo", "job": "b"}] * 2})
        assert answer.status_code == 200
        lines = (await client.get("/metrics")).text.splitlines()
        assert 'rollyard_gateway_refusals_total{reason="job_full"} 1.0' in lines


async def test_a_key_with_its_share_is_429_and_other_keys_are_served() -> None:
    one_key = {"authorization": "Bearer key-number-one"}
    other = {"authorization": "Bearer key-number-two"}
    async with (
        pool(api_keys="key-number-one,key-number-two", max_in_flight_per_key=3) as one,
        one.gateway.client() as client,
    ):
        runs = [{"run_id": f"r{index}", "code": "hold"} for index in range(3)]
        held = asyncio.create_task(client.post("/v1/batches", json={"runs": runs}, headers=one_key))
        await until(lambda: len(one.worker.started) == 3)
        answer = await client.post("/v1/runs", json={"code": "echo"}, headers=one_key)
        error = ErrorResponse.model_validate_json(answer.content)
        assert (answer.status_code, error.error) == (429, "overloaded")
        assert "ROLLYARD_MAX_IN_FLIGHT_PER_KEY" in error.message
        answer = await client.post("/v1/runs", json={"code": "echo"}, headers=other)
        assert answer.status_code == 200
        await one.worker.let_go("r0", "r1", "r2")
        assert (await held).status_code == 200
        many = [{"code": "echo"}] * 10  # larger than the share, and nothing else is in flight
        answer = await client.post("/v1/batches", json={"runs": many}, headers=one_key)
        assert answer.status_code == 200


async def test_of_many_calls_at_once_those_that_fit_are_served() -> None:
    """Forty calls at once, room for ten: nobody waits for ever, and what was admitted is served."""
    async with pool(max_queued=10) as one, one.gateway.client() as client:
        one.worker.only = 0
        calls = [
            asyncio.create_task(client.post("/v1/runs", json={"code": f"echo {index}"}))
            for index in range(40)
        ]
        await until(lambda: sum(call.done() for call in calls) >= 30)
        one.worker.only = None
        answers = await asyncio.gather(*calls)
        served = [answer for answer in answers if answer.status_code == 200]
        assert 1 <= len(served) <= 10
        assert {answer.status_code for answer in answers} == {200, 503}


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_in_flight_are_bounded_together(chunked: bool) -> None:
    code = "hold " + "#" * (700 * 1024)

    async def chunks() -> AsyncGenerator[bytes]:
        body = json.dumps({"code": code}).encode()
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with pool(max_held_bytes=MIB) as one, one.gateway.client() as client:
        first = asyncio.create_task(client.post("/v1/runs", json={"run_id": "a", "code": code}))
        await until(lambda: "a" in one.worker.started)
        if chunked:
            answer = await client.post("/v1/runs", content=chunks())
        else:
            answer = await client.post("/v1/runs", json={"code": code})
        error = ErrorResponse.model_validate_json(answer.content)
        assert (answer.status_code, error.error) == (503, "overloaded")
        assert "ROLLYARD_MAX_HELD_BYTES" in error.message
        assert (await client.post("/v1/runs", json={"code": "echo"})).status_code == 200
        await one.worker.let_go("a")
        assert (await first).status_code == 200
        again = asyncio.create_task(client.post("/v1/runs", json={"run_id": "b", "code": code}))
        await one.worker.let_go("b")
        assert (await again).status_code == 200


async def test_a_body_larger_than_all_that_may_be_held_is_served_when_alone() -> None:
    async with pool(max_held_bytes=MIB) as one, one.gateway.client() as client:
        body = {"code": "echo " + "#" * (2 * MIB)}
        assert (await client.post("/v1/runs", json=body)).status_code == 200


async def test_longest_wait_is_kept_at_the_rate_at_which_the_queue_drains() -> None:
    """A worker that does 40 runs a second, 400 runs waiting, one second allowed."""
    async with (
        EmbeddedServer() as server,
        queue_on(server) as queue,
        gateway(server.url, max_queued_wait_s=1) as process,
        process.client() as client,
    ):
        worker = NullWorker(queue, worker_id="slow", slots=2, service_s=0.05, lease_s=30)
        serving = asyncio.create_task(worker.run())
        await queue.submit(fillers(400), reply_to="nobody")
        error = await refused(client, {"code": "x"}, 503)
        assert error.error == "overloaded"
        assert "ROLLYARD_MAX_QUEUED_WAIT_S" in error.message
        assert error.retry_after_s is not None
        assert 1 < error.retry_after_s <= 30
        await queue.cancel([run.run_id for run in fillers(400)])
        async with asyncio.timeout(WITHIN_S):
            while (await client.post("/v1/runs", json={"code": "x"})).status_code != 200:
                await asyncio.sleep(0.01)
        worker.stop()
        await serving


async def test_readiness_says_why_a_queue_does_not_answer() -> None:
    async with gateway("unix:///nowhere/queue.sock") as process, process.client() as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert "/nowhere/queue.sock" in answer.json()["message"]
        answer = await client.post("/v1/runs", json={"code": "x"})
        assert "/nowhere/queue.sock" in answer.json()["message"]


async def test_a_server_without_memory_makes_the_gateway_unready_and_is_named() -> None:
    async with (
        EmbeddedServer(maxmemory_bytes=8 * MIB) as server,
        queue_on(server) as queue,
        gateway(server.url) as process,
        process.client() as client,
    ):
        assert (await client.get("/readyz")).status_code == 200
        calls: list[asyncio.Task[httpx2.Response]] = []
        async with asyncio.timeout(WITHIN_S):
            while not any(call.done() for call in calls):  # the first that is refused
                body = {"code": "echo", "stdin": "#" * 200_000}
                calls.append(asyncio.create_task(client.post("/v1/runs", json=body)))
                await asyncio.sleep(0.02)
            refusals = [call.result() for call in calls if call.done()]
            assert {answer.status_code for answer in refusals} == {503}
            assert "memory" in refusals[0].json()["message"].lower()
            while (answer := await client.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
            assert "memory" in answer.json()["message"].lower()
        async with PlayWorker(queue), asyncio.timeout(WITHIN_S):
            await asyncio.gather(*calls)
            while (await client.post("/v1/runs", json={"code": "echo"})).status_code != 200:
                await asyncio.sleep(0.01)
            assert (await client.get("/readyz")).status_code == 200


async def test_a_server_that_only_reads_is_named_and_recovery_needs_nobody() -> None:
    async with (
        EmbeddedServer() as server,
        queue_on(server) as queue,
        gateway(server.url) as process,
        process.client() as client,
    ):
        node = Server.from_url(server.url)
        await node.command("REPLICAOF", "127.0.0.1", "1")
        error = await refused(client, {"code": "x"}, 503)
        assert error.error == "unavailable"
        assert "read" in error.message.lower()
        assert (await client.get("/readyz")).status_code == 503
        await node.command("REPLICAOF", "NO", "ONE")
        async with PlayWorker(queue), asyncio.timeout(WITHIN_S):
            while (await client.post("/v1/runs", json={"code": "echo"})).status_code != 200:
                await asyncio.sleep(0.01)
        await node.close()


async def test_silent_server_is_refused_without_waiting_once_it_is_known() -> None:
    async with pool() as one, one.gateway.client() as client:
        os.kill(one.server.pid, signal.SIGSTOP)
        try:
            error = await refused(client, {"code": "x"}, 503)
            assert error.error == "unavailable"
            async with asyncio.timeout(WITHIN_S):
                while (await client.get("/readyz")).status_code == 200:
                    await asyncio.sleep(0.01)
        finally:
            os.kill(one.server.pid, signal.SIGCONT)
        async with asyncio.timeout(WITHIN_S):
            while (await client.post("/v1/runs", json={"code": "echo"})).status_code != 200:
                await asyncio.sleep(0.01)


async def test_no_page_asks_other_servers_for_its_scripts() -> None:
    async with pool() as one, one.gateway.client() as client:
        assert (await client.get("/docs")).status_code == 404
        assert (await client.get("/redoc")).status_code == 404
        assert (await client.get("/openapi.json")).status_code == 200
