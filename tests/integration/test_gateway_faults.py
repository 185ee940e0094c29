"""What a caller gets when Valkey, a worker or the gateway itself goes away."""

import asyncio
import json
import os
import signal
import stat
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from gateway_pool import PlayWorker, Pool, gateway, pool, until

from rollyard import AsyncClient
from rollyard_queue.base import QueueUnavailable
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.redis import RedisQueue

NDJSON = {"accept": "application/x-ndjson"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def kill(server: EmbeddedServer) -> None:
    """As a crash does it: no goodbye, and nothing is kept."""
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    await server.stop()


async def start_hold(client: httpx2.AsyncClient, one: Pool) -> tuple[str, asyncio.Task[Any]]:
    run_id = uuid4().hex
    request = {"run_id": run_id, "code": "hold"}
    call = asyncio.create_task(client.post("/v1/runs", json=request))
    await until(lambda: run_id in one.worker.started)
    return run_id, call


async def test_valkey_lost_and_back_while_runs_wait(tmp_path: Path) -> None:
    server = EmbeddedServer(directory=tmp_path)
    await server.start()
    queue = RedisQueue.from_url(server.url)
    async with gateway(server.url) as process, process.client() as client:
        running, waiting = uuid4().hex, uuid4().hex
        async with PlayWorker(queue) as worker:
            one = asyncio.create_task(
                client.post("/v1/runs", json={"run_id": running, "code": "hold"})
            )
            await until(lambda: running in worker.started)
        two = asyncio.create_task(client.post("/v1/runs", json={"run_id": waiting, "code": "echo"}))
        while (await queue.stats()).queued < 1:
            await asyncio.sleep(0.005)
        await kill(server)
        await until(lambda: any(event["event"] == "queue.lost" for event in process.events))
        async with asyncio.timeout(5):  # a new request is refused at once meanwhile
            assert (await client.post("/v1/runs", json={"code": "x"})).status_code == 503
        assert not one.done()
        assert not two.done()
        await server.start()
        async with PlayWorker(queue, "play-2") as worker:
            await worker.let_go(running)
            assert (await one).json()["stdout"] == "hold"
            assert (await two).json()["stdout"] == "echo"
            assert (await client.post("/v1/runs", json={"code": "echo"})).status_code == 200
    await queue.close()
    await server.stop()


async def test_frozen_valkey_is_503_within_five_seconds_and_then_serves_again() -> None:
    async with pool() as one, one.gateway.client() as client:
        assert (await client.post("/v1/runs", json={"code": "echo"})).status_code == 200
        os.kill(one.server.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                answers = await asyncio.gather(
                    *(client.post("/v1/runs", json={"code": "x"}) for _ in range(20)),
                    client.get("/readyz"),
                    client.get("/v1/stats"),
                    client.delete("/v1/runs/x"),
                )
            assert {answer.status_code for answer in answers} == {503}
            assert (await client.get("/healthz")).status_code == 200
        finally:
            os.kill(one.server.pid, signal.SIGCONT)

        async def served() -> bool:
            answer = await client.post("/v1/runs", json={"code": "echo"})
            return answer.status_code == 200

        async with asyncio.timeout(10):
            while not await served():
                await asyncio.sleep(0.05)
        # What was refused must not stay queued for nobody.
        async with asyncio.timeout(20):
            while True:
                stats = (await client.get("/v1/stats")).json()
                if (stats["queued"], stats["leased"], stats["in_flight"]) == (0, 0, 0):
                    break
                await asyncio.sleep(0.05)


async def test_run_that_nobody_takes_ends_as_infra_error() -> None:
    request = {"run_id": "nobody", "code": "x", "limits": {"timeout_s": 0.1}}
    async with (
        EmbeddedServer() as server,
        gateway(server.url, max_wait_s=0.2, slack_s=0.2) as process,
        process.client() as client,
    ):
        answer = await client.post("/v1/runs", json=request)
        assert answer.status_code == 200
        assert answer.json()["outcome"] == "infra_error"
        assert "stopped waiting" in answer.json()["message"]
        runs = [request, {**request, "run_id": "nobody-2"}]
        async with client.stream(
            "POST", "/v1/batches", json={"runs": runs}, headers=NDJSON
        ) as stream:
            lines = [json.loads(line) async for line in stream.aiter_lines()]
        assert [line["outcome"] for line in lines] == ["infra_error"] * 2
        queue = RedisQueue.from_url(server.url)
        async with asyncio.timeout(20):
            while (await queue.stats()).queued:
                await asyncio.sleep(0.01)
        await queue.close()


async def test_sigterm_finishes_what_is_in_flight() -> None:
    async with pool() as one, one.gateway.client() as client:
        run_id, call = await start_hold(client, one)
        one.gateway.terminate()
        await until(lambda: any(e["event"] == "gateway.stopping" for e in one.gateway.events))
        with pytest.raises(httpx2.ConnectError):
            async with one.gateway.client() as late:
                await late.get("/healthz")
        await one.worker.let_go(run_id)
        assert (await call).json()["outcome"] == "ok"
        await until(lambda: one.gateway.process.returncode is not None)


async def test_after_the_grace_whole_answers_are_503_and_streams_are_cut() -> None:
    async with pool(shutdown_grace_s=0.3) as one, one.gateway.client() as client:
        run_id, call = await start_hold(client, one)
        held, quick = uuid4().hex, uuid4().hex
        runs = [{"run_id": held, "code": "hold"}, {"run_id": quick, "code": "echo"}]
        lines: list[str] = []
        with pytest.raises(httpx2.RemoteProtocolError, match="incomplete"):
            async with client.stream(
                "POST", "/v1/batches", json={"runs": runs}, headers=NDJSON
            ) as stream:
                await until(lambda: held in one.worker.started)
                one.gateway.terminate()
                async for line in stream.aiter_lines():
                    lines.append(line)
        assert [json.loads(line)["run_id"] for line in lines] == [quick]
        answer = await call
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        await until(lambda: one.gateway.process.returncode is not None)
        # Both callers find their runs where they were, through another gateway.
        async with gateway(one.server.url) as second, second.client() as again:
            joined = [
                asyncio.create_task(again.post("/v1/runs", json={"run_id": name, "code": "hold"}))
                for name in (run_id, held)
            ]
            while (await again.get("/v1/stats")).json()["in_flight"] < 2:
                await asyncio.sleep(0.005)
            await one.worker.let_go(run_id, held)
            assert [(await answer).json()["outcome"] for answer in joined] == ["ok", "ok"]
        assert one.worker.cancelled == set()
        assert sorted(one.worker.starts) == sorted([run_id, held, quick])


async def test_restart_under_the_sdk_loses_nothing_and_repeats_nothing() -> None:
    """200 runs are in flight when their only gateway stops and a new one takes its port."""
    async with EmbeddedServer() as server:
        queue = RedisQueue.from_url(server.url)
        async with PlayWorker(queue) as worker:
            async with gateway(server.url, shutdown_grace_s=0.2) as first:
                client = AsyncClient(first.address, batch_max_runs=32)
                calls = [
                    asyncio.create_task(client.run(f"hold {i}", run_id=f"r{i}")) for i in range(200)
                ]
                await until(lambda: len(worker.started) == 200)
                await worker.let_go(*(f"r{i}" for i in range(50)))
                first.terminate()
                await until(lambda: first.process.returncode is not None)
                await worker.let_go(*(f"r{i}" for i in range(50, 100)))  # nobody hears of these
            async with gateway(server.url, "--port", str(first.port)):
                await worker.let_go(*(f"r{i}" for i in range(100, 200)))
                results = await asyncio.gather(*calls)
            await client.aclose()
            assert [(r.outcome, r.stdout) for r in results] == [
                ("ok", f"hold {i}") for i in range(200)
            ]
            assert len(worker.starts) == 200
            assert worker.cancelled == set()
        await queue.close()


async def test_worker_lost_in_the_middle_of_a_run() -> None:
    async with EmbeddedServer() as server, gateway(server.url) as process:
        queue = RedisQueue.from_url(server.url)
        async with process.client() as client:
            run_id = uuid4().hex
            call = asyncio.create_task(
                client.post("/v1/runs", json={"run_id": run_id, "code": "echo"})
            )
            while not await queue.claim("lost", max_runs=1, lease_s=0.2):
                await asyncio.sleep(0.005)
            async with PlayWorker(queue):
                result = (await call).json()  # the gateway's reaper gave the run to this worker
            assert (result["outcome"], result["attempt"]) == ("ok", 2)
        await queue.close()


async def test_deadline_passes_in_the_queue() -> None:
    async with (
        EmbeddedServer() as server,
        gateway(server.url) as process,
        process.client() as client,
    ):
        answer = await client.post("/v1/runs", json={"code": "x", "deadline_s": 0.1})
        assert answer.json()["outcome"] == "expired"


async def test_unix_socket_is_for_this_user_only(tmp_path: Path) -> None:
    async with EmbeddedServer() as server:
        path = tmp_path / "gateway.sock"
        async with gateway(server.url, uds=path) as process:
            assert process.address == str(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            transport = httpx2.AsyncHTTPTransport(uds=str(path))
            async with httpx2.AsyncClient(transport=transport, base_url="http://gw") as client:
                assert (await client.get("/readyz")).status_code == 200
            with pytest.raises(AssertionError, match="did not start"):
                async with gateway(server.url, uds=path):
                    pass
        with pytest.raises(QueueUnavailable):
            await RedisQueue.from_url(f"unix://{path}").ping()
