"""judge(): from what was seen to the one outcome, and the same message every time."""

import pytest

from rollyard_sandbox.reports import Evidence, SlotReport, judge

LIMITS: dict[str, float | int | None] = {
    "timeout_s": 2.5, "cpu_s": 1.5, "memory_bytes": 1000, "disk_bytes": 1, "pids": 1,
    "output_bytes": 77, "compile_timeout_s": 9.0,
}  # fmt: skip
KILLED = Evidence(oom_kills=2)
NONE = Evidence()


@pytest.mark.parametrize(
    ("report", "evidence", "outcome", "message"),
    [
        (SlotReport(exit_code=0), NONE, "ok", ""),
        (SlotReport(exit_code=3), NONE, "error", "exit code 3"),
        (SlotReport(exit_code=137), NONE, "error", "exit code 137"),
        (SlotReport(signal=9), NONE, "signal", "ended by signal 9"),
        (SlotReport(signal=9), KILLED, "memory", "memory limit of 1000 bytes reached"),
        (SlotReport(exit_code=1), KILLED, "memory", "memory limit of 1000 bytes reached"),
        (SlotReport(exit_code=0), KILLED, "ok",
         "2 of its processes killed at the memory limit"),
        (SlotReport(signal=9, killed="timeout"), NONE, "timeout",
         "wall-clock limit of 2.5 s reached"),
        (SlotReport(signal=9, killed="timeout", waited_ms=1200.4), NONE, "timeout",
         "wall-clock limit of 2.5 s reached (1200 ms of waiting for a core not counted)"),
        (SlotReport(signal=9, killed="timeout"), KILLED, "timeout",
         "wall-clock limit of 2.5 s reached; 2 of its processes killed at the memory limit"),
        (SlotReport(signal=9, killed="cpu_timeout"), NONE, "cpu_timeout",
         "CPU limit of 1.5 s reached"),
        (SlotReport(signal=9, killed="output_limit"), NONE, "output_limit",
         "more than 77 bytes of output on one stream"),
        (SlotReport(signal=9, killed="cancelled"), NONE, "cancelled", "cancelled by the caller"),
        # What we did to it comes before how it then ended.
        (SlotReport(exit_code=0, killed="timeout"), NONE, "timeout",
         "wall-clock limit of 2.5 s reached"),
        (SlotReport(exit_code=1, phase="compile"), NONE, "compile_error",
         "the compiler ended with exit code 1"),
        (SlotReport(signal=9, killed="timeout", phase="compile"), NONE, "timeout",
         "compiler's wall-clock limit of 9 s reached"),
    ],
)  # fmt: skip
def test_the_outcome_and_its_reason(
    report: SlotReport, evidence: Evidence, outcome: str, message: str
) -> None:
    assert judge(report, evidence, LIMITS) == (outcome, message)
