"""Runs through a real gateway and a real queue: order, streams, joins, cancellation."""

import asyncio
import json
from collections.abc import AsyncGenerator
from uuid import uuid4

import pytest
from gateway_pool import Pool, pool, until

from rollyard.types import BatchResponse, ErrorResponse, RunResult

NDJSON = {"accept": "application/x-ndjson"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def service(anyio_backend: str) -> AsyncGenerator[Pool]:
    async with pool() as one:
        yield one


def ids(count: int) -> list[str]:
    return [uuid4().hex for _ in range(count)]


async def test_run_returns_its_result(service: Pool) -> None:
    async with service.gateway.client() as client:
        answer = await client.post("/v1/runs", json={"code": "echo \N{SNOWMAN}\0"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    result = RunResult.model_validate_json(answer.content)
    assert (result.outcome, result.stdout) == ("ok", "echo \N{SNOWMAN}\0")
    assert len(result.run_id) == 32


async def test_worker_gets_every_field(service: Pool) -> None:
    request = {
        "run_id": uuid4().hex,
        "code": "echo x",
        "stdin": "in",
        "files": {"a/b.txt": "text", "c.bin": {"base64": "AAE="}},
        "fetch_files": ["*"],
        "limits": {"timeout_s": 3, "cpu_s": 2.5, "pids": 7},
        "template": "science",
        "job": "job/1",
        "deadline_s": 60,
    }
    async with service.gateway.client() as client:
        assert (await client.post("/v1/runs", json=request)).status_code == 200
    spec = service.worker.specs[str(request["run_id"])]
    assert (spec.code, spec.stdin, spec.template, spec.job) == ("echo x", "in", "science", "job/1")
    assert spec.files == {"a/b.txt": "text", "c.bin": {"base64": "AAE="}}
    assert (spec.limits.timeout_s, spec.limits.cpu_s, spec.limits.pids) == (3, 2.5, 7)
    assert spec.fetch_files == ["*"]


async def test_batch_is_answered_in_request_order(service: Pool) -> None:
    slow, *rest = ids(100)
    runs = [{"run_id": slow, "code": "hold"}]
    runs += [{"run_id": run_id, "code": f"echo {run_id}"} for run_id in rest]
    async with service.gateway.client() as client:
        pending = asyncio.create_task(client.post("/v1/batches", json={"runs": runs}))
        await until(lambda: rest[-1] in service.worker.specs)
        assert not pending.done()
        await service.worker.let_go(slow)
        answer = await pending
    results = BatchResponse.model_validate_json(answer.content).results
    assert [result.run_id for result in results] == [slow, *rest]
    assert [result.stdout for result in results[1:]] == [f"echo {run_id}" for run_id in rest]


async def test_stream_sends_each_line_before_the_batch_is_done(service: Pool) -> None:
    first, second, third = ids(3)
    runs = [
        {"run_id": first, "code": "hold\n1"},
        {"run_id": second, "code": "echo"},
        {"run_id": third, "code": "hold"},
    ]
    async with (
        service.gateway.client() as client,
        client.stream("POST", "/v1/batches", json={"runs": runs}, headers=NDJSON) as answer,
    ):
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["run_id"] == second
        await service.worker.let_go(third)
        assert json.loads(await anext(lines))["run_id"] == third
        await service.worker.let_go(first)
        assert json.loads(await anext(lines))["stdout"] == "hold\n1"
        assert [line async for line in lines] == []


async def test_same_id_runs_once_and_answers_both(service: Pool) -> None:
    [run_id] = ids(1)
    request = {"run_id": run_id, "code": "hold"}
    async with service.gateway.client() as client:
        calls = [asyncio.create_task(client.post("/v1/runs", json=request)) for _ in range(3)]
        await until(lambda: run_id in service.worker.started)
        await service.worker.let_go(run_id)
        answers = [await call for call in calls]
        late = await client.post("/v1/runs", json=request)
    assert {answer.content for answer in [*answers, late]} == {answers[0].content}
    assert service.worker.starts.count(run_id) == 1


async def test_cancel_of_a_running_run_reaches_worker_and_caller(service: Pool) -> None:
    [run_id] = ids(1)
    async with service.gateway.client() as client:
        call = asyncio.create_task(client.post("/v1/runs", json={"run_id": run_id, "code": "hold"}))
        await until(lambda: run_id in service.worker.started)
        answer = await client.delete(f"/v1/runs/{run_id}")
        assert answer.json() == {"run_id": run_id, "state": "running"}
        assert (await call).json()["outcome"] == "cancelled"
        await until(lambda: run_id in service.worker.cancelled)
        again = await client.delete(f"/v1/runs/{run_id}")
        assert again.json()["state"] == "done"


@pytest.mark.parametrize("run_id", ["never-seen", "not%20an%20id", "%F0%9F%8E%B2"])
async def test_cancel_of_an_unknown_run_is_404(service: Pool, run_id: str) -> None:
    async with service.gateway.client() as client:
        answer = await client.delete(f"/v1/runs/{run_id}")
    assert answer.status_code == 404
    assert ErrorResponse.model_validate_json(answer.content).error == "not_found"


async def test_disconnect_cancels_a_whole_batch(service: Pool) -> None:
    run_ids = ids(3)
    runs = [{"run_id": run_id, "code": "hold"} for run_id in run_ids]
    async with service.gateway.client() as client:
        call = asyncio.create_task(client.post("/v1/batches", json={"runs": runs}))
        await until(lambda: set(run_ids) <= service.worker.started.keys())
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await until(lambda: set(run_ids) <= service.worker.cancelled)


async def test_disconnect_cancels_what_a_stream_has_left(service: Pool) -> None:
    done, left = ids(2)
    runs = [{"run_id": done, "code": "echo"}, {"run_id": left, "code": "hold"}]
    async with (
        service.gateway.client() as client,
        client.stream("POST", "/v1/batches", json={"runs": runs}, headers=NDJSON) as answer,
    ):
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["run_id"] == done
        await until(lambda: left in service.worker.started)
    await until(lambda: left in service.worker.cancelled)
    assert done not in service.worker.cancelled


async def test_disconnect_spares_a_run_that_another_caller_waits_for(service: Pool) -> None:
    [run_id] = ids(1)
    request = {"run_id": run_id, "code": "hold"}
    async with service.gateway.client() as client, service.gateway.client() as leaver:
        stays = asyncio.create_task(client.post("/v1/runs", json=request))
        leaves = asyncio.create_task(leaver.post("/v1/runs", json=request))
        await until(lambda: run_id in service.worker.started)
        stats = await client.get("/v1/stats")
        assert stats.json()["in_flight"] >= 1
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        await leaver.aclose()
        # A cancellation would be sent ahead of this run's, so it would be known by then.
        [other] = ids(1)
        gone = asyncio.create_task(
            leave_after_start(service, {"run_id": other, "code": "hold"}, other)
        )
        await gone
        await until(lambda: other in service.worker.cancelled)
        assert run_id not in service.worker.cancelled
        await service.worker.let_go(run_id)
        assert (await stays).json()["outcome"] == "ok"


async def leave_after_start(service: Pool, request: dict[str, str], run_id: str) -> None:
    async with service.gateway.client() as client:
        call = asyncio.create_task(client.post("/v1/runs", json=request))
        await until(lambda: run_id in service.worker.started)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_run_of_a_caller_that_left_runs_anew_for_the_next(service: Pool) -> None:
    [run_id] = ids(1)
    request = {"run_id": run_id, "code": "hold"}
    await leave_after_start(service, request, run_id)
    async with service.gateway.client() as client:
        call = asyncio.create_task(client.post("/v1/runs", json=request))
        # Whether it joined or runs anew depends on which of the two came first; it must end.
        await until(lambda: run_id in service.worker.started)
        while not call.done():
            if run_id in service.worker.started:
                await service.worker.let_go(run_id)
            await asyncio.sleep(0.005)
        assert (await call).json()["outcome"] == "ok"


async def test_answers_are_not_mixed_up_after_a_storm_of_cancellations(service: Pool) -> None:
    async with service.gateway.client() as leaver:
        calls = [
            asyncio.create_task(leaver.post("/v1/runs", json={"code": f"hold {index}"}))
            for index in range(50)
        ]
        await asyncio.wait(calls, timeout=0.3)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    async with service.gateway.client() as client:
        answers = await asyncio.gather(
            *(client.post("/v1/runs", json={"code": f"echo {index}"}) for index in range(100))
        )
    assert [answer.json()["stdout"] for answer in answers] == [f"echo {i}" for i in range(100)]


async def test_nothing_is_in_flight_afterwards(service: Pool) -> None:
    async with service.gateway.client() as client:
        await client.post("/v1/runs", json={"code": "echo"})

        async def counts() -> tuple[int, int, int]:
            stats = (await client.get("/v1/stats")).json()
            return stats["queued"], stats["leased"], stats["in_flight"]

        async with asyncio.timeout(20):
            while await counts() != (0, 0, 0):
                await asyncio.sleep(0.01)
