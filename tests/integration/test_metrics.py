"""What gateway and worker tell Prometheus: all of it documented, and true of a real service."""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2
import pytest
from metered import Exposition, Metered, metered
from process_tree import below

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*?) ?\| ", re.MULTILINE)
ENDLESS = {"code": "while True: pass", "limits": {"timeout_s": 0.2}}
RUNS = [
    {"code": "print(1)"},
    {"code": "raise ValueError"},
    {"code": "import os; os.kill(os.getpid(), 9)"},
    {"code": "print(2)", "isolation": "fresh"},
    ENDLESS,
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def service(anyio_backend: str) -> AsyncGenerator[Metered]:
    async with metered() as one:
        async with one.gateway.client() as client:
            answer = await client.post("/v1/batches", json={"runs": RUNS})
            outcomes = [result["outcome"] for result in answer.json()["results"]]
            assert outcomes == ["ok", "error", "signal", "ok", "timeout"]
            assert (await client.post("/v1/runs", json={"code": 1})).status_code == 422
            assert (await client.get("/nowhere")).status_code == 404
        yield one


def documented() -> dict[str, tuple[str, set[str]]]:
    """Name to type and labels, as docs/metrics.md says."""
    text = (ROOT / "docs/metrics.md").read_text()
    rows = {
        name: (kind, {label.strip() for label in labels.split(",")} - {""})
        for name, kind, labels in ROW.findall(text)
    }
    for name in re.findall(r"`(process_\w+)`", text):
        rows[name] = ("counter" if name.endswith("_total") else "gauge", set())
    return rows


async def test_every_metric_is_documented_and_every_documented_one_is_there(
    service: Metered,
) -> None:
    exposed: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    for page in await service.scrape():
        for name, family in page.families.items():
            exposed[f"{name}_total" if family.type == "counter" else name] = family.type
        for name, met in page.labels().items():
            labels.setdefault(name, set()).update(met)
    rows = documented()
    assert exposed == {name: kind for name, (kind, _) in rows.items()}
    for name, met in labels.items():
        # A family without a sample shows no labels: nothing of its kind has happened.
        assert met in (rows[name][1], set()), name


async def test_runs_are_counted_on_both_sides(service: Metered) -> None:
    gateway, worker = await service.scrape()
    for page, prefix in ((gateway, "rollyard_gateway"), (worker, "rollyard_worker")):
        assert page.value(f"{prefix}_runs_total", outcome="ok") == 2
        assert page.value(f"{prefix}_runs_total", outcome="timeout") == 1
        for name in ("queued", "wall", "total"):
            metric = f"{prefix}_run_{name}_seconds"
            assert page.value(f"{metric}_count", outcome="ok", template="fresh") == 1
            assert page.value(f"{metric}_count", outcome="timeout", template="bare") == 1
        wall_s = page.value(f"{prefix}_run_wall_seconds_sum", outcome="timeout", template="bare")
        total_s = page.value(f"{prefix}_run_total_seconds_sum", outcome="timeout", template="bare")
        assert 0.2 <= wall_s <= total_s
    assert gateway.value("rollyard_gateway_runs_admitted_total") == len(RUNS)
    assert gateway.value("rollyard_gateway_refusals_total", reason="invalid_request") == 1
    assert gateway.value("rollyard_gateway_refusals_total", reason="not_found") == 1
    assert worker.value("rollyard_worker_claimed_runs_total") == len(RUNS)
    assert worker.value("rollyard_worker_run_cpu_seconds_total", template="bare") > 0.05


async def test_queue_and_slots(service: Metered) -> None:
    gateway, worker = await service.scrape()
    assert gateway.value("rollyard_queue_up") == 1
    assert gateway.value("rollyard_queue_workers") == 1
    assert gateway.value("rollyard_queue_slots") == 4
    assert gateway.value("rollyard_queue_finished_total") == len(RUNS)
    assert gateway.value("rollyard_queue_runs") == 0
    assert gateway.value("rollyard_queue_max_runs") == 100_000
    states = [
        worker.value("rollyard_worker_slots", state=state) for state in ("busy", "idle", "unmade")
    ]
    assert sum(states) == worker.value("rollyard_worker_max_slots") == 4
    assert worker.value("rollyard_worker_template_up", template="bare") == 1
    assert worker.value("rollyard_worker_template_memory_bytes", template="bare") > 1 << 20
    assert worker.value("rollyard_worker_programs_memory_bytes") > 0


async def test_a_template_that_dies_is_seen(service: Metered) -> None:
    async with service.gateway.client() as client:
        assert (await client.post("/v1/runs", json={"code": "1"})).json()["outcome"] == "ok"
        [jail] = [one for one in below(service.worker_pid) if one.parent == service.worker_pid]
        [template] = [one for one in below(jail.pid) if one.parent == jail.pid]
        os.kill(template.pid, signal.SIGKILL)
        assert (await client.post("/v1/runs", json={"code": "1"})).json()["outcome"] == "ok"
    # The slot that was there serves on, so the new template may come after the answer.
    of_bare = {"template": "bare"}
    async with asyncio.timeout(60):
        while True:
            _, worker = await service.scrape()
            with contextlib.suppress(KeyError):  # a counter is there once it has counted
                if worker.value("rollyard_worker_template_restarts_total", **of_bare) == 1:
                    break
            await asyncio.sleep(0.05)
    assert worker.value("rollyard_worker_template_up", **of_bare) == 1


async def test_a_port_that_is_taken_is_told(service: Metered) -> None:
    port = service.worker_address.rpartition(":")[2]
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "rollyard_sandbox", "--templates", "bare", "--slots", "1"),
        env=os.environ | {"ROLLYARD_METRICS_PORT": port},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await worker.communicate()
    assert worker.returncode == 3
    assert f"rollyard: metrics cannot be served at 127.0.0.1:{port}".encode() in said


def test_exposition_finds_what_is_there_only() -> None:
    with pytest.raises(KeyError):
        Exposition().value("rollyard_gateway_runs_total", outcome="ok")


async def test_worker_endpoint_serves_loopback_alone(service: Metered) -> None:
    assert service.worker_address.startswith("http://127.0.0.1:")
    async with httpx2.AsyncClient() as http:
        answer = await http.get(f"{service.worker_address}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
