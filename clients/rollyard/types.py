"""The wire contract: what a run asks for and what comes back.

One vocabulary everywhere (HTTP, SDK, metrics, logs): *run*, *batch*, *worker*, *template*,
*slot*, *outcome*, *job*, *lease*. Units are suffixes: ``timeout_s``, ``memory_bytes``,
``queued_ms``. The gateway validates these models once; behind it the same JSON travels.
"""

import re
from base64 import b64decode
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollyard.errors import RunFailed

Outcome = Literal[
    "ok",  # exit code 0
    "error",  # uncaught exception or an exit code other than 0
    "compile_error",  # the compiler refused the code
    "timeout",  # wall clock
    "cpu_timeout",  # CPU time
    "memory",  # the kernel killed it at its memory limit
    "output_limit",  # only where the caller asked for on_output_limit="stop"
    "signal",  # ended by a signal that no limit sent
    "cancelled",  # by the caller
    "expired",  # its deadline passed before it ran
    "infra_error",  # ours: mask it out of training, never reward 0
]
"""How a run ended; exactly one."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

Template = Literal["auto", "bare", "science", "plot"]
Language = Literal["python", "bash", "cpp"]

SOURCES: dict[Language, str] = {"python": "main.py", "bash": "main.sh", "cpp": "main.cpp"}
"""Name of the code's own file in the working directory."""

MIB = 1024 * 1024
RUN_ID_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}$"
JOB_PATTERN = r"^[A-Za-z0-9_.:/-]{1,64}$"
MAX_FILES = 64
MAX_PATH_CHARS = 255
MAX_NAME_BYTES = 255  # of one part, as file systems have it
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class Limits(_Wire):
    """What one run may use. The server has a maximum for each; above it the answer is 422."""

    timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 10.0
    """Wall clock of the program alone, in seconds: the queue and our start-up are not counted."""
    compile_timeout_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 10.0
    """Wall clock of the compiler, for languages that have one; ``timeout_s`` is the program's."""
    cpu_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None = None
    """CPU seconds of all processes together; None: bounded by ``timeout_s`` alone."""
    memory_bytes: Annotated[int, Field(ge=16 * MIB, le=1 << 40)] = 512 * MIB
    """Memory of the whole run: all its processes and the files it writes."""
    disk_bytes: Annotated[int, Field(ge=1 * MIB, le=1 << 40)] = 64 * MIB
    """Size of the private file system that holds the working directory, /tmp and /dev/shm."""
    pids: Annotated[int, Field(ge=1, le=4096)] = 64
    """Processes and threads at once."""
    output_bytes: Annotated[int, Field(ge=0, le=64 * MIB)] = 256 * 1024
    """Bytes kept of each of stdout and stderr (head and tail); the rest is read and dropped."""


class Base64File(_Wire):
    """A file that is not UTF-8 text."""

    base64: str

    @field_validator("base64")
    @classmethod
    def _decodable(cls, value: str) -> str:
        if len(value) % 4 or not _BASE64.fullmatch(value):
            raise ValueError("not base64 (RFC 4648 section 4, with padding)")
        return value


FileContent = str | Base64File


def check_relative_path(path: str) -> str:
    """Return ``path`` if it names a place below the working directory.

    Raises:
        ValueError: it is empty, absolute, too long, has NUL, an empty part, ``.`` or ``..``.
    """
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path:
        raise ValueError(f"file path must have 1 to {MAX_PATH_CHARS} characters and no NUL")
    if any(len(part.encode("utf-8", "replace")) > MAX_NAME_BYTES for part in path.split("/")):
        raise ValueError(f"a part of file path {path[:40]!r}… has more than {MAX_NAME_BYTES} bytes")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"file path {path!r} must be relative, without empty, '.' or '..' parts")
    return path


class RunRequest(_Wire):
    """One program to run."""

    run_id: Annotated[str, Field(pattern=RUN_ID_PATTERN)] | None = None
    """Idempotency key: submitted twice, it runs once and both callers get the one result."""
    code: str
    stdin: str | None = None
    """Standard input as text; None and "" are both end of file at once."""
    files: dict[str, FileContent] = Field(default_factory=dict)
    """Files put into the working directory first: relative path to content."""
    fetch_files: list[str] = Field(default_factory=list, max_length=MAX_FILES)
    """Paths to return afterwards, or patterns such as ``*.png``; ``*`` is every regular file of the
    working directory but the code. At most 64 files and 8 MiB; matplotlib's ``show()`` writes
    ``figure-1.png`` and so on."""
    limits: Limits = Field(default_factory=Limits)
    language: Language = "python"
    """What ``code`` is written in. ``bash`` and ``cpp`` run as commands in the same jail."""
    isolation: Literal["warm", "fresh"] = "warm"
    """``fresh``: a jail and an interpreter made for this run alone; the same result, slower."""
    echo_last: bool = False
    """As in a notebook: show the value of a last expression on stdout (warm Python only)."""
    template: Template = "auto"
    """Warm interpreter to fork from; ``auto`` looks at the imports."""
    on_output_limit: Literal["truncate", "stop"] = "truncate"
    """Past ``limits.output_bytes``: keep running and drop, or end with ``output_limit``."""
    job: Annotated[str, Field(pattern=JOB_PATTERN)] = "default"
    """The training job that the run is accounted to."""
    deadline_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    """Seconds from now within which it must start; else its outcome is ``expired``."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Within the job, higher goes first; of equals the earliest deadline, then the oldest."""

    @field_validator("files")
    @classmethod
    def _paths(cls, value: dict[str, FileContent]) -> dict[str, FileContent]:
        if len(value) > MAX_FILES:
            raise ValueError(f"at most {MAX_FILES} files")
        for path in value:
            check_relative_path(path)
        return value

    @field_validator("fetch_files")
    @classmethod
    def _fetch_paths(cls, value: list[str]) -> list[str]:
        for path in value:
            if path != "*":
                check_relative_path(path)
        return value

    @model_validator(mode="after")
    def _text_is_utf8(self) -> Self:
        # A lone surrogate cannot be encoded; refused here, it never reaches a queue or a pipe.
        _check_text("code", self.code)
        _check_text("stdin", self.stdin or "")
        for path, content in self.files.items():
            _check_text("files", path)
            if isinstance(content, str):
                _check_text(f"files.{path}", content)
        return self

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.echo_last and (self.language != "python" or self.isolation != "warm"):
            raise ValueError("echo_last: only warm Python has it")
        return self

    @model_validator(mode="after")
    def _files_fit(self) -> Self:
        # What cannot be written is the request's fault: said now, not by a run that fails.
        source = SOURCES[self.language]
        if any(path.split("/")[0] == source for path in self.files):
            raise ValueError(f"files: {source} is where the code itself stands")
        needed = _pages(len(self.code.encode()))
        for path, content in self.files.items():
            text = isinstance(content, str)
            needed += _pages(len(content.encode()) if text else len(content.base64) // 4 * 3)
            parents = path.split("/")[:-1]
            for depth in range(1, len(parents) + 1):
                if (above := "/".join(parents[:depth])) in self.files:
                    raise ValueError(f"files: {above!r} is a file and a directory of {path!r}")
        if needed > self.limits.disk_bytes:
            raise ValueError(
                f"files: they and the code need {needed} bytes; "
                f"limits.disk_bytes is {self.limits.disk_bytes}"
            )
        return self


def _check_text(name: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is not valid Unicode text: {error}") from None


def _pages(size: int) -> int:
    return -(-size // 4096) * 4096


class BatchRequest(_Wire):
    """Many runs in one request. One malformed run refuses the whole batch and is named."""

    runs: Annotated[list[RunRequest], Field(min_length=1, max_length=1024)]


class RunResult(_Wire):
    """What happened to one run. All but ``run_id`` and ``outcome`` may be at their defaults."""

    model_config = ConfigDict(extra="ignore", frozen=True)  # an older SDK reads a newer server

    run_id: str
    outcome: Outcome
    phase: Literal["compile", "run"] = "run"
    """``compile``: the compiler ended the run, and all of the below is the compiler's."""
    exit_code: int | None = None
    """Exit code 0 to 255 of the program's first process, or None when it did not exit."""
    signal: int | None = None
    """The signal that ended the first process, or None."""
    stdout: str = ""
    """UTF-8, undecodable bytes as U+FFFD; when truncated, head and tail around a marker line."""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    files: dict[str, FileContent] = Field(default_factory=dict)
    """What ``fetch_files`` named and existed as a regular file below the working directory."""
    wall_ms: float = 0.0
    """From the program's start to its end, measured outside it."""
    cpu_ms: float = 0.0
    """User and system time of all its processes."""
    peak_memory_bytes: int = 0
    """Of the whole run, from its cgroup; 0 where the machine has none."""
    queued_ms: float = 0.0
    """From admission until a worker started it."""
    attempt: int = 1
    """1 unless a worker was lost and the run was delivered again."""
    worker_id: str = ""
    template: str = ""
    degraded: list[str] = Field(default_factory=list)
    """Sandbox layers that the worker's machine could not give; empty in production."""
    message: str = ""
    """For people: which limit struck, or what went wrong on our side."""

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    def file_bytes(self, path: str) -> bytes:
        """The content of a returned file, whether it came as text or as base64.

        Raises:
            KeyError: ``path`` is not in ``files``.
        """
        content = self.files[path]
        return content.encode() if isinstance(content, str) else b64decode(content.base64)

    @property
    def is_infra(self) -> bool:
        """True when the run says nothing about the program: mask it, never score it."""
        return self.outcome in ("infra_error", "expired", "cancelled")

    def raise_for_outcome(self) -> Self:
        """Return self when the outcome is ``ok``.

        Raises:
            RunFailed: any other outcome; ``RunFailed.result`` is this result.
        """
        if self.outcome != "ok":
            raise RunFailed(self)
        return self


class BatchResponse(_Wire):
    """Results in the order of the request's runs."""

    results: list[RunResult]


class FieldProblem(_Wire):
    field: str
    """Path in the request, such as ``runs.3.limits.timeout_s``."""
    message: str


class ErrorResponse(_Wire):
    """Body of every answer that is not 2xx."""

    error: Literal[
        "invalid_request",  # 422
        "conflict",  # 409: a run id that belongs to another program
        "too_large",  # 413
        "unauthorized",  # 401
        "not_found",  # 404
        "overloaded",  # 429 (this job) or 503 (everybody), with Retry-After
        "unavailable",  # 503, with Retry-After
        "internal",  # 500
    ]
    message: str
    problems: list[FieldProblem] = Field(default_factory=list[FieldProblem])
    retry_after_s: float | None = None
    request_id: str = ""
