"""When a run's time begins, on a real slot: with its program's process, not with the order."""

import asyncio
import os
import signal
import time

import msgspec
import pytest

from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox import clock
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.machine import open_machine
from rollyard_sandbox.reports import SlotReport
from rollyard_sandbox.settings import WorkerSettings
from rollyard_sandbox.slots import SlotLost

DISK = 8 << 20
LIMITS = LimitsSpec(timeout_s=0.3, cpu_s=None, memory_bytes=128 << 20, disk_bytes=DISK, pids=16,
                    output_bytes=4096)  # fmt: skip


def _run(code: str, *, late_s: float, limits: LimitsSpec = LIMITS) -> SlotReport:
    """Run a program whose PID 1 sleeps at first, as it would on a machine without a free core."""

    async def run() -> SlotReport:
        chosen = WorkerSettings(slots=1, templates="bare")
        async with open_machine(chosen, say=lambda _: None) as machine:
            slot = await machine.pool.acquire("bare", DISK)
            spec = RunSpec(
                run_id="clock", code=code, stdin=None, files={}, fetch_files=[], limits=limits,
                template="bare", on_output_limit="truncate", job="clock",
            )  # fmt: skip
            os.kill(slot.pid, signal.SIGSTOP)
            wake = asyncio.get_running_loop().call_later(late_s, os.kill, slot.pid, signal.SIGCONT)
            try:
                report, _ = await Execution(slot, spec).run()
            finally:
                wake.cancel()
                os.kill(slot.pid, signal.SIGCONT)
                await machine.pool.release(slot)
            return report

    return asyncio.run(run())


def test_a_pid_1_that_wakes_up_late_costs_the_program_nothing() -> None:
    report = _run("import time; time.sleep(0.1); print('well')", late_s=0.7)
    assert (report.killed, report.exit_code, report.stdout) == (None, 0, "well\n")


def test_from_then_on_the_limit_holds() -> None:
    started = time.monotonic()
    report = _run("import time; time.sleep(60)", late_s=0.7)
    assert report.killed == "timeout"
    assert time.monotonic() - started < 30
    assert report.wall_ms > 250


def test_a_program_that_was_never_forked_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_START_PATIENCE_S", 0.2)
    with pytest.raises(SlotLost):
        _run("print(1)", late_s=2.0)


def test_the_smallest_limit_is_a_timeout_and_not_our_fault() -> None:
    limits = msgspec.structs.replace(LIMITS, timeout_s=0.0001)
    report = _run("import time; time.sleep(60)", late_s=0.0, limits=limits)
    assert report.killed == "timeout"


def test_what_a_program_forks_does_not_move_its_start() -> None:
    """The oldest process counts; younger ones, and new sessions, are of no avail."""
    code = """
import os, time
while True:
    if os.fork() == 0:
        os.setsid(); time.sleep(60)
    time.sleep(0.05)
"""
    started = time.monotonic()
    report = _run(code, late_s=0.0)
    assert report.killed == "timeout"
    assert time.monotonic() - started < 20


def test_usage_tells_when_the_oldest_was_forked() -> None:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    own = clock.usage([os.getpid(), 1])
    assert own.first_s is not None and own.first_s < now
    assert own.cpu_s > 0 and own.waited_s > 0
    assert clock.usage([]) == (0.0, 0.0, None)
