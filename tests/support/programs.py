"""Programs of the security tests, and how they are run."""

import contextlib
import os
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

from live_service import Service
from process_tree import until

from rollyard import RunResult
from rollyard.types import Limits

PRELUDE = """
import ctypes, errno, os, resource, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(action, *arguments):
    try:
        action(*arguments)
        return "allowed"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return line.split(":", 1)[1].strip()
"""


def run(service: Service, code: str, limits: Limits | None = None) -> RunResult:
    """Run ``code`` after the prelude."""
    return service.client.run(PRELUDE + code, limits=limits)


def ran(service: Service, code: str, limits: Limits | None = None) -> str:
    """Run a program that must end well; return what it printed."""
    result = run(service, code, limits)
    assert result.outcome == "ok", result
    return result.stdout


@contextlib.contextmanager
def running(service: Service, *codes: str) -> Generator[list["Future[RunResult]"]]:
    """Programs that are under way when the block starts; their results come as futures."""
    ids = [f"running-{number}-{os.urandom(4).hex()}" for number in range(len(codes))]
    with ThreadPoolExecutor(len(codes)) as threads:
        runs = [
            threads.submit(service.client.run, code, run_id=one)
            for code, one in zip(codes, ids, strict=True)
        ]
        try:
            assert until(lambda: len(service.family().programs) >= len(codes))
            yield runs
        finally:
            for one in ids:
                service.client.cancel(one)


def named(text: str) -> dict[str, str]:
    """Programs in one text, each below a line ``## name``."""
    programs: dict[str, str] = {}
    for part in text.split("\n## ")[1:]:
        name, _, code = part.partition("\n")
        programs[name] = code + "\n"
    return programs
