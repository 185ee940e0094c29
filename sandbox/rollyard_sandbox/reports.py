"""From a slot's report and the kernel's evidence to the one result of a run."""

import msgspec

from rollyard_queue.records import Delivery

MAX_RESULT_BYTES = 16 * 1024 * 1024
_CUT_CHARS = 1024 * 1024  # each at most six bytes in JSON: two streams stay below the maximum
_KILLED_MESSAGES = {
    "timeout": "wall-clock limit of {timeout_s:g} s reached",
    "cpu_timeout": "CPU limit of {cpu_s} s reached",
    "output_limit": "more than {output_bytes} bytes of output on one stream",
    "cancelled": "cancelled by the caller",
    "memory": "memory limit of {memory_bytes} bytes reached (measured from outside)",
}


class SlotReport(msgspec.Struct, frozen=True):
    """What happened to a run, as far as it was seen from outside the program."""

    exit_code: int | None = None
    signal: int | None = None
    killed: str | None = None
    refused: bool = False
    phase: str = "run"
    waited_ms: float = 0.0
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    files: dict[str, str | dict[str, str]] = {}
    left_out: list[str] = []


class ResultRecord(msgspec.Struct, omit_defaults=True):
    """``rollyard.types.RunResult`` as a worker writes it."""

    run_id: str
    outcome: str
    phase: str = "run"
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    files: dict[str, str | dict[str, str]] = {}
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    peak_memory_bytes: int = 0
    queued_ms: float = 0.0
    attempt: int = 1
    worker_id: str = ""
    template: str = ""
    degraded: list[str] = []
    message: str = ""


class Evidence(msgspec.Struct, frozen=True):
    """What the slot's control group says of a run."""

    oom_kills: int = 0
    """At the run's own limit."""
    foreign_kills: int = 0
    """For want of memory elsewhere: on the machine, or in a group above the run's."""
    peak_memory_bytes: int = 0


def judge(
    report: SlotReport, evidence: Evidence, limits: dict[str, float | int | None]
) -> tuple[str, str]:
    """Return outcome and message.

    The order is the rule: what we did to the run, then what the kernel did at a limit, then what
    the program did itself. An exit code is never read as a limit, nor a limit from a number.
    """
    killed = f"{evidence.oom_kills} of its processes killed at the memory limit"
    if report.killed is not None:
        text = _KILLED_MESSAGES[report.killed].format(**limits)
        if report.phase == "compile" and report.killed == "timeout":
            text = f"compiler's wall-clock limit of {limits['compile_timeout_s']:g} s reached"
        if report.waited_ms >= 1:
            text += f" ({report.waited_ms:.0f} ms of waiting for a core not counted)"
        return report.killed, f"{text}; {killed}" if evidence.oom_kills else text
    if report.refused:
        return "error", "the request's files cannot be written; see stderr"
    if evidence.oom_kills and report.exit_code != 0:
        return "memory", f"memory limit of {limits['memory_bytes']} bytes reached"
    if report.signal is not None:
        return "signal", f"ended by signal {report.signal}"
    if report.exit_code == 0:  # it coped with the loss of a child
        return "ok", killed if evidence.oom_kills else ""
    if report.phase == "compile":
        return "compile_error", f"the compiler ended with exit code {report.exit_code}"
    return "error", f"exit code {report.exit_code}"


_encoder = msgspec.json.Encoder()


def encode(record: ResultRecord) -> bytes:
    """The record as JSON, cut so that no result is larger than queue and gateway should carry."""
    encoded = _encoder.encode(record)
    if len(encoded) <= MAX_RESULT_BYTES:
        return encoded
    note = f"result of {len(encoded)} bytes cut: its files are left out"
    record = msgspec.structs.replace(
        record,
        files={},
        stdout=_cut(record.stdout),
        stderr=_cut(record.stderr),
        stdout_truncated=record.stdout_truncated or len(record.stdout) > _CUT_CHARS,
        stderr_truncated=record.stderr_truncated or len(record.stderr) > _CUT_CHARS,
        message=f"{record.message}; {note}" if record.message else note,
    )
    return _encoder.encode(record)


def _cut(text: str) -> str:
    if len(text) <= _CUT_CHARS:
        return text
    half = _CUT_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters dropped ...]\n{text[-half:]}"


def infra_error(delivery: Delivery, worker_id: str, message: str) -> bytes:
    """The result of a run that we failed, not the program."""
    return encode(
        ResultRecord(
            run_id=delivery.run_id,
            outcome="infra_error",
            message=message,
            queued_ms=delivery.queued_ms,
            attempt=delivery.attempt,
            worker_id=worker_id,
        )
    )
