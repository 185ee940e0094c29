"""Records that travel through the queue (msgspec: decoded once per run on the hot path)."""

from typing import Literal

import msgspec

DIGEST_BYTES = 8


class QueuedRun(msgspec.Struct, frozen=True):
    """A run on its way in; ``payload`` is the JSON of a ``rollyard.types.RunRequest`` with id.

    ``run_id`` has no white space (``rollyard.types.RUN_ID_PATTERN``).
    """

    run_id: str
    payload: bytes
    job: str = "default"
    expires_in_ms: int | None = None
    priority: int = 0
    """Within the job, higher goes first; of equals the earliest deadline, then the oldest."""
    digest: bytes = b""
    """DIGEST_BYTES that differ where two runs of one id are not the same; empty: same as any."""


class SubmitReceipt(msgspec.Struct, frozen=True):
    """What became of one submitted run.

    ``accepted``: queued now. ``joined``: the same id is queued or running; its one result comes
    to this caller too. ``done``: it has ended; ``result`` is its result (JSON).
    """

    run_id: str
    state: Literal["accepted", "joined", "done"]
    result: bytes | None = None


class Delivery(msgspec.Struct, frozen=True):
    """A run handed to a worker under a lease. ``attempt`` counts from 1 and fences ``finish``."""

    run_id: str
    payload: bytes
    attempt: int
    queued_ms: float


class FinishedRun(msgspec.Struct, frozen=True):
    """A result on its way out. ``result`` is the JSON of a ``rollyard.types.RunResult``."""

    run_id: str
    attempt: int
    result: bytes


class Reply(msgspec.Struct, frozen=True):
    """A result that reached the gateway that waits for it."""

    run_id: str
    result: bytes


class Notice(msgspec.Struct, frozen=True):
    """Why a worker's wait ended. Neither: the time was over."""

    work: bool = False
    cancelled: tuple[str, ...] = ()


class QueueStats(msgspec.Struct, frozen=True):
    queued: int
    leased: int
    queued_bytes: int
    oldest_queued_ms: float
    workers: int
    """Workers that announced themselves within the last few seconds."""
    slots: int
    """Sum of their slots."""
    finished_total: int
    redelivered_total: int


class LimitsSpec(msgspec.Struct, frozen=True):
    """``rollyard.types.Limits`` as the worker reads it; what is at its default may be left out."""

    timeout_s: float = 10.0
    cpu_s: float | None = None
    memory_bytes: int = 512 << 20
    disk_bytes: int = 64 << 20
    pids: int = 64
    output_bytes: int = 256 << 10
    compile_timeout_s: float = 10.0


class RunSpec(msgspec.Struct, frozen=True):
    """``rollyard.types.RunRequest`` as the worker reads it from a payload.

    What is at its default may be left out: a small run is then a quarter as long. The defaults are
    those of ``rollyard.types`` (a test compares them), so gateways and workers of one queue must
    not disagree about them.
    """

    run_id: str
    code: str
    stdin: str | None = None
    files: dict[str, str | dict[str, str]] = {}
    fetch_files: list[str] = []
    limits: LimitsSpec = LimitsSpec()
    template: str = "auto"
    on_output_limit: str = "truncate"
    job: str = "default"
    language: str = "python"
    isolation: str = "warm"
    echo_last: bool = False
