"""What a gateway refuses, and how it says so."""

import asyncio
import gzip
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from gateway_pool import Pool, gateway, pool, until

from rollyard.types import ErrorResponse
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.redis import RedisQueue

MAX_BODY_BYTES = 1_000_000
KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def service(anyio_backend: str) -> AsyncGenerator[Pool]:
    async with pool(max_body_bytes=MAX_BODY_BYTES, max_memory_bytes=1 << 30) as one:
        yield one


async def post(
    service: Pool, content: bytes | AsyncGenerator[bytes], path: str = "/v1/runs", **headers: str
) -> tuple[int, ErrorResponse]:
    async with service.gateway.client() as client:
        answer = await client.post(path, content=content, headers=headers)
    error = ErrorResponse.model_validate_json(answer.content)
    assert error.request_id == answer.headers["x-request-id"]
    return answer.status_code, error


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"code": "print(1)"', ""),
        (b"", ""),
        (b"[" * 100_000, ""),
        (b'{"code":' * 100_000, ""),
        (b"[]", ""),
        (b"\xff\xfe", ""),
        (b'{"stdin": "x"}', "code"),
        (b'{"code": 123}', "code"),
        (b'{"code": null}', "code"),
        (b'{"code": "x", "timout_s": 1}', "timout_s"),
        (b'{"code": "x", "limits": {"timeout_s": -1}}', "limits.timeout_s"),
        (b'{"code": "x", "limits": {"timeout_s": 0}}', "limits.timeout_s"),
        (b'{"code": "x", "limits": {"timeout_s": NaN}}', "limits.timeout_s"),
        (b'{"code": "x", "limits": {"timeout_s": 1e999}}', "limits.timeout_s"),
        (b'{"code": "x", "limits": {"timeout_s": "5"}}', "limits.timeout_s"),
        (b'{"code": "x", "limits": {"timeout_s": 1e9}}', "limits.timeout_s"),
        (b'{"code": "x", "limits": {"pids": true}}', "limits.pids"),
        (b'{"code": "x", "limits": {"pids": ' + b"9" * 60 + b"}}", "limits.pids"),
        (b'{"code": "x", "limits": {"pids": ' + b"9" * 6000 + b"}}", ""),
        (b'{"code": "x", "limits": {"memory_bytes": 2147483648}}', "limits.memory_bytes"),
        (b'{"code": "\\ud800"}', ""),
        (b'{"code": "\xed\xa0\x80"}', ""),
        (b'{"code": "x", "stdin": "\\udfff"}', ""),
        (b'{"code": "x", "files": {"../a": ""}}', "files"),
        (b'{"code": "x", "files": {"a": 1}}', "files.a.str"),
        (b'{"code": "x", "run_id": "a b"}', "run_id"),
        (b'{"code": "x", "run_id": ""}', "run_id"),
        (b'{"code": "x", "a\\u001b[31m": 1}', "a\\x1b[31m"),
    ],
)
async def test_malformed_run_is_422_and_names_the_field(
    service: Pool, body: bytes, field: str
) -> None:
    status, error = await post(service, body)
    assert (status, error.error) == (422, "invalid_request")
    assert field in [problem.field for problem in error.problems]


@pytest.mark.parametrize(
    ("runs", "field"),
    [
        ([], "runs"),
        ([{"code": "x"}] * 1025, "runs"),
        ([{"code": "x"}, {"code": "x", "limits": {"timeout_s": -1}}], "runs.1.limits.timeout_s"),
        ([{"code": "x"}, {"code": "x", "limits": {"timeout_s": 601}}], "runs.1.limits.timeout_s"),
        ([{"code": "x", "run_id": "twice"}] * 2, "runs.1.run_id"),
        ([{"code": "x"}, 7], "runs.1"),
    ],
)
async def test_one_malformed_run_refuses_the_batch(
    service: Pool, runs: list[Any], field: str
) -> None:
    status, error = await post(service, json.dumps({"runs": runs}).encode(), "/v1/batches")
    assert (status, error.error) == (422, "invalid_request")
    assert [problem.field for problem in error.problems] == [field]


async def test_maximum_is_named(service: Pool) -> None:
    _, error = await post(service, b'{"code": "x", "limits": {"timeout_s": 700}}')
    assert "600" in error.problems[0].message


async def test_code_is_never_quoted(service: Pool) -> None:
    _, error = await post(service, b'{"code": {"secret-word": 1}}')
    assert "secret-word" not in error.model_dump_json()


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_body_is_413(service: Pool, chunked: bool) -> None:
    async def chunks() -> AsyncGenerator[bytes]:
        for _ in range(20):
            yield b" " * (MAX_BODY_BYTES // 10)

    status, error = await post(service, chunks() if chunked else b" " * (MAX_BODY_BYTES + 1))
    assert (status, error.error) == (413, "too_large")
    assert str(MAX_BODY_BYTES) in error.message


async def test_declared_large_body_is_refused_before_it_is_sent(service: Pool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.gateway.port)
    writer.write(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_body_of_exactly_the_maximum_is_read(service: Pool) -> None:
    start, end = b'{"code":"', b'"}'
    body = start + b"#" * (MAX_BODY_BYTES - len(start) - len(end)) + end
    async with service.gateway.client() as client:
        assert (await client.post("/v1/runs", content=body)).status_code == 200


async def test_compressed_body_is_422(service: Pool) -> None:
    status, error = await post(
        service, gzip.compress(b" " * 10_000_000), **{"content-encoding": "gzip"}
    )
    assert status == 422
    assert error.problems[0].field == "content-encoding"


async def test_structure_that_would_fill_memory_is_422(service: Pool) -> None:
    body = b'{"code":[' + b"[]," * (MAX_BODY_BYTES // 4) + b"1]}"
    status, _ = await post(service, body)
    assert status == 422


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/run", 404),
        ("POST", "/v1/runs/", 404),
        ("GET", "/v1/runs", 405),
        ("PUT", "/v1/batches", 405),
        ("POST", "/healthz", 405),
    ],
)
async def test_unknown_route_or_method(service: Pool, method: str, path: str, status: int) -> None:
    async with service.gateway.client() as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    error = ErrorResponse.model_validate_json(answer.content)
    assert error.error == ("not_found" if status == 404 else "invalid_request")
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("given", ["step-1:call.7", "a" * 128])
async def test_request_id_is_echoed(service: Pool, given: str) -> None:
    async with service.gateway.client() as client:
        answer = await client.post("/v1/runs", content=b"{", headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, '"<script>'])
async def test_odd_request_id_is_replaced(service: Pool, given: str) -> None:
    async with service.gateway.client() as client:
        answer = await client.get("/healthz", headers={"x-request-id": given})
    assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
async def test_pages_of_other_sites_are_refused(service: Pool, origin: str) -> None:
    status, error = await post(service, b'{"code": "x"}', origin=origin)
    assert (status, error.error) == (401, "unauthorized")


async def test_rebound_name_is_refused(service: Pool) -> None:
    host = f"evil.example:{service.gateway.port}"
    status, _ = await post(service, b'{"code": "x"}', origin=f"http://{host}", host=host)
    assert status == 401


async def test_own_page_is_accepted(service: Pool) -> None:
    async with service.gateway.client() as client:
        headers = {"origin": service.gateway.address}
        answer = await client.post("/v1/runs", json={"code": "echo"}, headers=headers)
    assert answer.status_code == 200


async def test_openapi_has_every_reference_and_an_example(service: Pool) -> None:
    async with service.gateway.client() as client:
        document = (await client.get("/openapi.json")).json()
    text = json.dumps(document)
    for name in ("RunRequest", "BatchRequest", "RunResult", "BatchResponse", "ErrorResponse"):
        assert f'"#/components/schemas/{name}"' in text
        assert name in document["components"]["schemas"]
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in document["components"]["schemas"]
    body = document["paths"]["/v1/runs"]["post"]["requestBody"]["content"]["application/json"]
    async with service.gateway.client() as client:
        assert (await client.post("/v1/runs", json=body["example"])).status_code == 200


async def test_metrics_count_requests_and_outcomes(service: Pool) -> None:
    async with service.gateway.client() as client:
        await client.post("/v1/runs", json={"code": "echo"})
        await client.get("/no/such/path")
        text = (await client.get("/metrics")).text
    line = 'rollyard_gateway_requests_total{method="POST",route="/v1/runs",status="200"}'
    assert line in text
    assert 'route="none",status="404"' in text
    assert "/no/such/path" not in text
    assert 'rollyard_gateway_runs_total{outcome="ok"}' in text
    assert "rollyard_gateway_runs_in_flight 0.0" in text
    assert "rollyard_gateway_run_queued_seconds_bucket" in text


@pytest.fixture(scope="module")
async def locked(anyio_backend: str) -> AsyncGenerator[Pool]:
    async with pool(api_keys=f"other-key, {KEY}") as one:
        yield one


@pytest.mark.parametrize(
    "given", [None, "", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", "Bearer ,"]
)
@pytest.mark.parametrize("path", ["/v1/runs", "/v1/stats", "/metrics", "/openapi.json", "/x"])
async def test_without_a_key_everything_is_401(locked: Pool, given: str | None, path: str) -> None:
    headers = {} if given is None else {"authorization": given}
    async with locked.gateway.client() as client:
        answer = await client.get(path, headers=headers)
    assert answer.status_code == 401
    assert ErrorResponse.model_validate_json(answer.content).error == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_key_opens_and_probes_need_none(locked: Pool) -> None:
    async with locked.gateway.client() as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        headers = {"authorization": f"bearer {KEY}"}
        answer = await client.post("/v1/runs", json={"code": "echo"}, headers=headers)
        assert answer.status_code == 200


async def test_full_queue_is_503_at_once_and_recovers(anyio_backend: str) -> None:
    async with EmbeddedServer() as server, gateway(server.url, max_queued=2) as process:
        queue = RedisQueue.from_url(server.url)
        async with process.client() as client:
            runs = [{"code": "echo"}] * 3
            answer = await client.post("/v1/batches", json={"runs": runs})
            error = ErrorResponse.model_validate_json(answer.content)
            assert (answer.status_code, error.error) == (503, "overloaded")
            assert error.retry_after_s is not None
            assert int(answer.headers["retry-after"]) >= error.retry_after_s > 0
            assert (await queue.stats()).queued == 0
            stats = (await client.get("/v1/stats")).json()
            assert stats["in_flight"] == 0
        await queue.close()


async def test_public_address_without_key_is_refused(anyio_backend: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard_service", "--host", "0.0.0.0", "--port", "0"),
        env={},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"ROLLYARD_API_KEYS" in stderr


async def test_without_a_queue_runs_are_503_and_the_process_is_healthy(
    anyio_backend: str,
) -> None:
    async with gateway("unix:///nowhere/queue.sock") as process, process.client() as client:
        for path in ("/v1/runs", "/v1/batches"):
            body: dict[str, Any] = (
                {"code": "x"} if path == "/v1/runs" else {"runs": [{"code": "x"}]}
            )
            answer = await client.post(path, json=body)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert ErrorResponse.model_validate_json(answer.content).error == "unavailable"
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/v1/stats")).status_code == 503
        assert (await client.delete("/v1/runs/x")).status_code == 503
        await until(lambda: any(event["event"] == "queue.lost" for event in process.events))
