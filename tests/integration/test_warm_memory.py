"""Templates whose memory cannot be made cheap to fork serve all the same."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from changed_guest import change_guest

from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.machine import open_machine
from rollyard_sandbox.settings import WorkerSettings

pytestmark = pytest.mark.anyio
DISK = 8 << 20
LIMITS = LimitsSpec(timeout_s=9, cpu_s=None, memory_bytes=64 << 20, disk_bytes=DISK, pids=16,
                    output_bytes=4096)  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


async def test_a_kernel_that_refuses_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = 'raise OSError(13, "refused here")'
    change_guest(
        monkeypatch,
        folder,
        "mappings.py",
        "        os.ftruncate(",
        f"        {refused}\n        os.ftruncate(",
    )
    caplog.set_level(logging.WARNING)
    settings = WorkerSettings(slots=1, templates="bare")
    async with open_machine(settings, say=lambda _: None) as machine:
        slot = await machine.pool.acquire("bare", DISK)
        spec = RunSpec(
            run_id="x", code="print('rollyard-warm' in open('/proc/self/maps').read())",
            stdin=None, files={}, fetch_files=[], limits=LIMITS, template="bare",
            on_output_limit="truncate", job="test",
        )  # fmt: skip
        try:
            report, _ = await Execution(slot, spec).run()
        finally:
            await machine.pool.release(slot)
    assert (report.exit_code, report.stdout) == (0, "False\n"), report
    said = [getattr(record, "text", "") for record in caplog.records]
    assert any("refused here" in text for text in said), said
