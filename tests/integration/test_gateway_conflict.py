"""One id is one run: what comes under it with another content is refused, and runs nothing."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from gateway_pool import PlayWorker, Pool, gateway, pool, until

from rollyard import AsyncClient, Conflict
from rollyard.types import ErrorResponse, RunResult
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import QueuedRun
from rollyard_queue.redis import RedisQueue


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def service(anyio_backend: str) -> AsyncGenerator[Pool]:
    async with pool() as one:
        yield one


def fresh() -> str:
    return uuid4().hex


async def post(service: Pool, *runs: dict[str, Any]) -> tuple[int, ErrorResponse | None]:
    async with service.gateway.client() as client:
        answer = await client.post("/v1/batches", json={"runs": runs})
    if answer.status_code == 200:
        return 200, None
    return answer.status_code, ErrorResponse.model_validate_json(answer.content)


@pytest.mark.parametrize("state", ["queued", "running", "done"])
async def test_another_program_under_an_id_is_409_and_nothing_is_queued(
    service: Pool, state: str
) -> None:
    run_id, neighbour = fresh(), fresh()
    service.worker.only = 0 if state == "queued" else None
    code = "echo 1" if state == "done" else "hold 1"
    async with service.gateway.client() as client:
        first = asyncio.create_task(client.post("/v1/runs", json={"run_id": run_id, "code": code}))
        if state == "queued":
            await until_queued(service)
        elif state == "running":
            await until(lambda: run_id in service.worker.started)
        else:
            await first
        runs = [{"run_id": neighbour, "code": "echo"}, {"run_id": run_id, "code": "echo 2"}]
        status, error = await post(service, *runs)
        assert status == 409
        assert error is not None and error.error == "conflict"
        assert [problem.field for problem in error.problems] == ["runs.1.run_id"]
        assert run_id in error.message
        service.worker.only = None
        if state != "done":
            await service.worker.let_go(run_id)
        assert RunResult.model_validate_json((await first).content).stdout == code
    assert neighbour not in service.worker.specs
    assert service.worker.starts.count(run_id) == 1
    lines = await metrics(service)
    assert 'rollyard_gateway_refusals_total{reason="conflict"}' in lines


async def until_queued(service: Pool) -> None:
    async with asyncio.timeout(20):
        while not (await service.queue.stats()).queued:
            await asyncio.sleep(0.005)


async def metrics(service: Pool) -> str:
    async with service.gateway.client() as client:
        return (await client.get("/metrics")).text


@pytest.mark.parametrize(
    "other",
    [
        {"limits": {"timeout_s": 3}},
        {"stdin": "x"},
        {"language": "bash"},
        {"files": {"a": "b"}},
        {"job": "other"},
    ],
)
async def test_other_limits_or_files_are_another_run(service: Pool, other: dict[str, Any]) -> None:
    run = {"run_id": fresh(), "code": "echo"}
    assert await post(service, run) == (200, None)
    status, error = await post(service, run | other)
    assert status == 409 and error is not None and error.error == "conflict"


@pytest.mark.parametrize(
    ("other", "neighbour"),
    [
        ({"deadline_s": 5}, {}),
        ({"priority": 9}, {}),
        ({"deadline_s": 5, "priority": -9}, {"files": {"a": "b"}}),  # read by other code
    ],
)
async def test_a_retry_is_the_same_run(
    service: Pool, other: dict[str, Any], neighbour: dict[str, Any]
) -> None:
    run = {"run_id": fresh(), "code": "echo", "limits": {"timeout_s": 3}, "deadline_s": 60}
    assert await post(service, run) == (200, None)
    again = [run | other, {"run_id": fresh(), "code": "echo", **neighbour}]
    assert await post(service, *again) == (200, None)
    assert service.worker.starts.count(str(run["run_id"])) == 1


async def test_callers_of_one_moment_get_one_program_and_the_rest_a_conflict(
    service: Pool,
) -> None:
    """They share a round trip into the queue: whoever is second must not get the first's result."""
    run_id = fresh()
    async with service.gateway.client() as client:
        answers = await asyncio.gather(
            *(
                client.post("/v1/runs", json={"run_id": run_id, "code": f"echo {number}"})
                for number in range(12)
            ),
            *(client.post("/v1/runs", json={"code": "echo other"}) for _ in range(12)),
        )
    assert [answer.status_code for answer in answers[12:]] == [200] * 12
    statuses = [answer.status_code for answer in answers[:12]]
    assert sorted(statuses) == [200] + [409] * 11
    served = statuses.index(200)
    assert RunResult.model_validate_json(answers[served].content).stdout == f"echo {served}"
    assert service.worker.starts.count(run_id) == 1


async def test_of_the_sdks_batch_only_the_guilty_run_fails(service: Pool) -> None:
    run_id = fresh()
    async with AsyncClient(service.gateway.address) as client:
        assert (await client.run("echo 1", run_id=run_id)).stdout == "echo 1"
        answers = await asyncio.gather(
            client.run("echo 2", run_id=run_id),
            client.run("echo 1", run_id=run_id, deadline_s=9, priority=5),
            *(client.run(f"echo {n}") for n in range(5)),
            return_exceptions=True,
        )
    assert isinstance(answers[0], Conflict)
    assert answers[0].run_id == run_id
    outputs = [answer.stdout for answer in answers[1:] if isinstance(answer, RunResult)]
    assert outputs == ["echo 1", *(f"echo {n}" for n in range(5))]


async def test_a_lost_run_whose_id_was_taken_meanwhile_is_a_fault_of_ours(tmp_path: Path) -> None:
    """The queue forgot it; its result would be the other program's."""
    async with EmbeddedServer(directory=tmp_path) as server:
        queue = RedisQueue.from_url(server.url)
        async with gateway(server.url) as process, process.client() as client:
            calls = [
                asyncio.create_task(client.post("/v1/runs", json={"run_id": name, "code": "hold"}))
                for name in ("taken", "mine")
            ]
            async with asyncio.timeout(20):
                while (await queue.stats()).queued < 2:
                    await asyncio.sleep(0.005)
            process.process.send_signal(signal.SIGSTOP)
            os.kill(server.pid, signal.SIGKILL)
            await server.stop()
            await server.start()
            other = QueuedRun("taken", b'{"run_id":"taken","code":"echo"}', digest=b"another!")
            await queue.submit([other], reply_to="elsewhere")
            process.process.send_signal(signal.SIGCONT)
            async with PlayWorker(queue) as worker:
                lost = RunResult.model_validate_json((await calls[0]).content)
                assert lost.outcome == "infra_error"
                assert "another program" in lost.message
                await worker.let_go("mine")
                assert RunResult.model_validate_json((await calls[1]).content).stdout == "hold"
        await queue.close()


async def test_waiting_runs_of_the_sdk_go_by_priority(service: Pool) -> None:
    service.worker.only = 0
    job = fresh()
    async with AsyncClient(service.gateway.address, job=job) as client:
        single = [
            asyncio.create_task(client.run(f"echo {priority}", priority=priority))
            for priority in (-5, 0, 7)
        ]
        batch = asyncio.create_task(
            client.run_all([{"code": "echo 100", "priority": 100}, "echo plain"])
        )
        async with asyncio.timeout(20):
            while (await service.queue.stats()).queued < 5:
                await asyncio.sleep(0.005)
        service.worker.only = None
        results = [await one for one in single] + list(await batch)
    places = {service.worker.starts.index(one.run_id): one.stdout.split()[1] for one in results}
    order = [places[place] for place in sorted(places)]
    assert order[:2] == ["100", "7"]
    assert order[-1] == "-5"
