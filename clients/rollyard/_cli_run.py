"""``rollyard run``: one program, through the service, with its output passed on as it is."""

import contextlib
import os
import re
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rollyard._cli_serve import complain, require_extra
from rollyard._client import Client
from rollyard.errors import (
    BadRequest,
    PayloadTooLarge,
    RollyardError,
    TransportError,
    Unauthorized,
)
from rollyard.local import local
from rollyard.types import Limits, RunResult, Template

OK, PROGRAM_FAILED, USAGE, OURS = 0, 1, 2, 3
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"^(\d+)([KMG]?)(?:i?B)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line of ``rollyard run``."""

    file: str
    stdin: Path | None
    timeout_s: float
    memory: str
    template: Template
    url: str | None
    local: bool
    allow_degraded: bool
    as_json: bool


class _UsageError(Exception):
    """The command line asks for something that cannot be; the message says what."""


def run_program(options: RunOptions) -> int:
    """Run the program, print its output and a summary, and return the exit code."""
    try:
        _check_flags(options)
        code = _read_program(options.file)
        stdin = None if options.stdin is None else _read_text(options.stdin)
        limits = _limits(options)
        with _client(options) as client:
            result = client.run(code, stdin=stdin, limits=limits, template=options.template)
    except (_UsageError, BadRequest, PayloadTooLarge, Unauthorized) as error:
        complain(str(error))
        return USAGE
    except TransportError as error:
        complain(f"{error}\n{_how_to_start(options)}" if not options.local else str(error))
        return OURS
    except RollyardError as error:
        complain(str(error))
        return OURS
    _print(result, as_json=options.as_json)
    if result.ok:
        return OK
    return OURS if result.is_infra else PROGRAM_FAILED


def _check_flags(options: RunOptions) -> None:
    if options.local and options.url is not None:
        raise _UsageError(
            f"--local starts a service for this run, --url {options.url} names another: give one "
            "of the two"
        )
    if options.allow_degraded and not options.local:
        raise _UsageError(
            "--allow-degraded goes with --local; a service that runs already decided at its start"
        )


def _read_program(file: str) -> str:
    if file == "-":
        return _decoded(sys.stdin.buffer.read(), "standard input")
    return _read_text(Path(file))


def _read_text(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise _UsageError(f"cannot read {path}: {error.strerror}") from None


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _UsageError(f"{name} is not UTF-8 text: {error}") from None


def _limits(options: RunOptions) -> Limits:
    size = _SIZE.match(options.memory.strip())
    if size is None:
        raise _UsageError(f"--memory {options.memory!r} is not a size such as 256M or 2G")
    try:
        return Limits(
            timeout_s=options.timeout_s,
            memory_bytes=int(size[1]) * _UNITS[size[2].upper()],
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise _UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@contextlib.contextmanager
def _client(options: RunOptions) -> Generator[Client]:
    if options.local:
        require_extra("local")
        complain("starting a service for this run")
        with local(allow_degraded=options.allow_degraded) as client:
            yield client
        return
    try:
        client = Client(options.url, max_retries=1)
    except ValueError as error:
        raise _UsageError(str(error)) from None
    with client:
        yield client


def _how_to_start(options: RunOptions) -> str:
    if url := options.url or os.environ.get("ROLLYARD_URL"):
        return f"Is the service at {url} running?"
    return (
        "No service answers on this machine. Start one with `rollyard up`, name one with --url, "
        "or add --local to start one for this run."
    )


def _print(result: RunResult, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(result.model_dump_json() + "\n")
        return
    for stream, text in ((sys.stdout, result.stdout), (sys.stderr, result.stderr)):
        stream.buffer.write(text.encode())  # whatever the locale is
        stream.flush()
    complain(_summary(result))


def _summary(result: RunResult) -> str:
    parts = [result.outcome]
    if result.exit_code:
        parts.append(f"exit code {result.exit_code}")
    if result.signal:
        parts.append(f"signal {result.signal}")
    parts.append(f"{result.wall_ms:.0f} ms")
    parts.append(f"{result.cpu_ms:.0f} ms CPU")
    if result.peak_memory_bytes:
        parts.append(f"{result.peak_memory_bytes / (1 << 20):.0f} MiB")
    parts.append(f"queued {result.queued_ms:.0f} ms")
    if result.stdout_truncated or result.stderr_truncated:
        parts.append("output truncated")
    if result.degraded:
        parts.append(f"DEGRADED: without {', '.join(result.degraded)}")
    if result.message and result.outcome not in ("error", "signal"):  # said above
        parts.append(result.message)
    return ", ".join(parts)
