"""A whole service under test: guarded, with canaries, and looked into from outside."""

import contextlib
import fcntl
import json
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import httpx2
import pytest
import redis
from guard import Guard
from process_tree import Process, below, processes

import rollyard
from rollyard.local import local

CANARY_VARIABLE, CANARY_VALUE = "SANDBOX_CANARY_SECRET", "canary-env-7f3a"
CANARY_FILE, CANARY_TEXT = Path("/srv/canary/secret.txt"), "canary-file-19c2"
CANARY_USERS = CANARY_FILE.with_name("users.lock")
GUARD_MEMORY_BYTES, GUARD_PIDS = 6 << 30, 1500
TAG = "{rollyard:0}:"
QUEUE_KEYS = (
    *("load", "ring", "leases", "deadlines", "queue", "runs", "payloads"),
    *("owners", "history", "running", "bytes", "probation", "trials"),
)


@dataclass
class Service:
    """A running service, its client, and its processes as the host sees them."""

    client: rollyard.Client
    address: str
    pids: dict[str, int]
    slots: int
    groups: dict[str, Path]

    @property
    def directory(self) -> Path:
        """Where its sockets are."""
        return Path(self.address.removeprefix("unix://")).parent

    def http(self) -> httpx2.Client:
        """A plain HTTP client, for requests that the SDK refuses to send."""
        transport = httpx2.HTTPTransport(uds=str(self.directory / "gateway.sock"))
        return httpx2.Client(transport=transport, base_url="http://service", timeout=60)

    def valkey(self) -> "redis.Redis":
        return redis.Redis(unix_socket_path=str(self.directory / "valkey.sock"))

    @property
    def worker_pid(self) -> int:
        """The worker of now: the supervisor starts a killed one again."""
        for one in below(self.pids["supervisor"]):
            if one.parent == self.pids["supervisor"] and _is_module(one.pid, "rollyard_sandbox"):
                return one.pid
        return 0

    def family(self) -> "Family":
        return Family(self.worker_pid)

    def leaves(self) -> list[Path]:
        """Control groups of slots, in every controller."""
        found: list[Path] = []
        for group in self.groups.values():
            found += group.glob("rollyard-*/slot-*")
        return found

    def unfinished_keys(self) -> list[str]:
        """Keys of the queue that hold a run which has not ended, or an answer nobody took."""
        left: list[str] = []
        with contextlib.closing(self.valkey()) as server:
            keys = cast("list[bytes]", server.keys(TAG + "*"))  # pyright: ignore[reportUnknownMemberType]
            for key in keys:
                name = key.decode().removeprefix(TAG)
                kind = name.partition(":")[0]
                # What has ended is in done:, gone: and totals.
                if kind in QUEUE_KEYS or (kind == "replies" and server.xlen(key)):
                    left.append(name)
        return left


class Family:
    """A worker's descendants, told apart by their PID namespaces."""

    def __init__(self, worker_pid: int) -> None:
        self.worker = worker_pid
        self.templates: list[Process] = []
        self.slots: list[Process] = []
        self.programs: list[Process] = []
        own = len(_namespace_pids(os.getpid()))
        for one in below(worker_pid) if worker_pid else set[Process]():
            inside = _namespace_pids(one.pid)
            if len(inside) == own + 1:
                self.templates.append(one)
            elif len(inside) == own + 2:
                # PID 1 of the innermost namespace is the slot, all others are the program's.
                (self.slots if inside[-1] == 1 else self.programs).append(one)


def _namespace_pids(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return [int(word) for word in line.split()[1:]]
    return []


def _is_module(pid: int, module: str) -> bool:
    with contextlib.suppress(OSError):
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


@contextlib.contextmanager
def canaries() -> Generator[None]:
    """Place what no program may ever see; fails at the end if something touched it."""
    with _canary_users() as users:
        if not CANARY_FILE.exists():  # else others look at it: what they are to see stays
            written = CANARY_FILE.with_name(f"{os.getpid()}.new")
            written.write_text(CANARY_TEXT)
            written.replace(CANARY_FILE)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(CANARY_VARIABLE, CANARY_VALUE)
                yield
            assert canary_faults() == []
        finally:
            # Another session, or another process of this one, may still look at it.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in (CANARY_FILE, CANARY_USERS):
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # the next one has just made its lock there
                    CANARY_FILE.parent.rmdir()


def _canary_users() -> IO[str]:
    """The lock that all hold, shared, who look at the canary; on the file that is there now."""
    while True:
        CANARY_FILE.parent.mkdir(parents=True, exist_ok=True)
        # Its last user may go, and take it along, between any two of these lines.
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as given_up:
            users = given_up.enter_context(CANARY_USERS.open("w"))
            fcntl.flock(users, fcntl.LOCK_SH)
            if CANARY_USERS.stat().st_ino == os.fstat(users.fileno()).st_ino:
                given_up.pop_all()
                return users


def canary_faults() -> list[str]:
    faults = [f"{path} was made" for path in Path("/tmp").glob("pwned-*")]
    if CANARY_FILE.read_text() != CANARY_TEXT:
        faults.append(f"{CANARY_FILE} was changed")
    return faults


@contextlib.contextmanager
def serve(name: str, *, slots: int, templates: tuple[str, ...] | None = None) -> Generator[Service]:
    """Start a service inside a guard; on leaving, nothing of it is left."""
    guard = Guard(name, memory_bytes=GUARD_MEMORY_BYTES, pids=GUARD_PIDS)
    try:
        started = local(slots=slots, templates=templates)
        try:
            with guard.inside():
                started.start()
            with rollyard.Client(started.address) as client:
                yield Service(client, started.address, started.pids, slots, guard.groups)
        finally:
            started.stop()
    finally:
        guard.close()


def is_running(pid: int) -> bool:
    now = processes().get(pid)
    return now is not None and now.state not in "ZX"


def post(service: Service, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Send raw bytes; return status and text of the answer."""
    with service.http() as http:
        answer = http.post(
            path, content=body, headers={"Content-Type": "application/json", **headers}
        )
        return answer.status_code, answer.text


def post_json(service: Service, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Send JSON with everything but ASCII escaped, so that lone surrogates travel too."""
    return post(service, path, json.dumps(body).encode())
