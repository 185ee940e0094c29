"""A machine without control groups: limits are coarser, and still limits (--allow-degraded)."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox import machine, reports
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.pool import Pool
from rollyard_sandbox.settings import WorkerSettings

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def pool() -> AsyncIterator[Pool]:
    """Real jails; only the look for control groups finds none."""

    def none() -> None:
        raise OSError("none on this machine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "open_cgroups", none)
        settings = WorkerSettings(slots=2, templates="bare")
        async with machine.open_machine(settings, say=lambda _: None) as opened:
            assert opened.missing == ["cgroup_memory", "cgroup_pids"]
            yield opened.pool


async def verdict(
    pool: Pool, code: str, *, memory_bytes: int = 100 * MIB, cpu_s: float | None = None
) -> tuple[str, str, reports.SlotReport]:
    limits = LimitsSpec(
        timeout_s=10.0, cpu_s=cpu_s, memory_bytes=memory_bytes, disk_bytes=64 * MIB, pids=32,
        output_bytes=65536,
    )  # fmt: skip
    spec = RunSpec(
        run_id="x", code=code, stdin=None, files={}, fetch_files=[], limits=limits,
        template="bare", on_output_limit="truncate", job="test",
    )  # fmt: skip
    slot = await pool.acquire("bare", 64 * MIB)
    try:
        report, evidence = await Execution(slot, spec).run()
    finally:
        await pool.release(slot)
    return *reports.judge(report, evidence, msgspec.structs.asdict(limits)), report


async def test_one_process_meets_its_memory_limit(pool: Pool) -> None:
    outcome, _, report = await verdict(pool, "b = bytearray(300 << 20)")
    assert outcome == "error"
    assert "MemoryError" in report.stderr


async def test_below_the_limit_nothing_happens(pool: Pool) -> None:
    outcome, _, report = await verdict(pool, "b = bytearray(60 << 20)\nprint(len(b))")
    assert (outcome, report.stdout) == ("ok", f"{60 * MIB}\n")


async def test_many_processes_together_are_measured_from_outside(pool: Pool) -> None:
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        b = bytearray(20 << 20)
        for i in range(0, len(b), 4096):
            b[i] = 1
        time.sleep(30)
time.sleep(30)
"""
    outcome, message, _ = await verdict(pool, code)
    assert (outcome, "measured from outside" in message) == ("memory", True)


async def test_the_templates_memory_is_not_the_programs(pool: Pool) -> None:
    code = """
import time, ctypes
for line in open("/proc/self/maps").readlines():
    start, end = (int(address, 16) for address in line.split()[0].split("-"))
    if "rollyard-warm" in line:
        for page in range(start, end, 4096):
            ctypes.c_ubyte.from_address(page).value
time.sleep(0.3)
rollup = open("/proc/self/smaps_rollup").read().split()
print(sum(int(rollup[rollup.index(name) + 1]) for name in ("Private_Dirty:", "Pss_Shmem:")))
"""
    outcome, _, report = await verdict(pool, code, memory_bytes=4 * MIB)
    assert outcome == "ok", report
    assert int(report.stdout) > 4 << 10  # what would be too much if it were the program's


@pytest.mark.parametrize(("mebibytes", "expected"), [(60, "ok"), (99, "memory")])
async def test_shared_memory_counts(pool: Pool, mebibytes: int, expected: str) -> None:
    code = f"""
import mmap, time
shared = mmap.mmap(-1, {mebibytes} << 20)
for _ in range({mebibytes}):
    shared.write(b"x" * (1 << 20))
time.sleep(0.3 if {expected!r} == "ok" else 9)
"""
    outcome, message, _ = await verdict(pool, code, memory_bytes=80 * MIB)
    assert (outcome, "measured from outside" in message) == (expected, expected == "memory")


async def test_processes_are_counted_by_user(pool: Pool) -> None:
    code = "import os, time\nfor _ in range(50):\n    if os.fork() == 0:\n        time.sleep(30)"
    outcome, _, report = await verdict(pool, code)
    assert outcome == "error"
    assert "BlockingIOError" in report.stderr


async def test_cpu_is_counted_from_the_processes(pool: Pool) -> None:
    outcome, _, report = await verdict(pool, "while True: pass", cpu_s=0.3)
    assert outcome == "cpu_timeout"
    assert report.cpu_ms >= 300
