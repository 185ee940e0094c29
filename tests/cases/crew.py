"""The parts of a service as processes of the test's own, so that each can be killed or stopped.

Nothing restarts a part but the test: what a supervisor would do is done where a test says so.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol, cast

import httpx2
import redis
from guard import Guard
from live_service import GUARD_MEMORY_BYTES, GUARD_PIDS, Family, Service
from process_tree import until

import rollyard

SHORT_LEASE_S = 2.0
"""So that a lost run comes back soon; a machine that is starved for as long redelivers for nothing,
so only where runs are to be lost."""
START_S = 60.0
STOP_S = 20.0
USUAL_FILES = 1024
"""What login shells and systemd give a process to open, unless it asks for more."""
_SKEWED = Path(__file__).with_name("skewed.py")


class Part:
    """One process of ours and what it has logged."""

    def __init__(self, directory: Path, name: str, command: list[str], env: dict[str, str]) -> None:
        self._log = directory / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log's lines that tell of one event."""
        found: list[dict[str, Any]] = []
        for line in self._log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == name:
                    found.append(event)
        return found

    def said(self, name: str, *, times: int = 1) -> None:
        """Wait until it has logged an event this often."""
        ok = until(
            lambda: len(self.events(name)) >= times or self.exit_code is not None,
            timeout_s=START_S,
        )
        assert ok and len(self.events(name)) >= times, self._log.read_text(errors="replace")[-3000:]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @contextlib.contextmanager
    def frozen(self) -> Generator[None]:
        """Stopped for as long as the block lasts."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def kill(self) -> None:
        """At once and without a goodbye."""
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Ask it to stop; its exit code. Killed when it does not."""
        if self._process.poll() is None:
            self.send(signal.SIGCONT)
            self._process.terminate()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class _Commands(Protocol):
    def ping(self) -> bool: ...
    def config_set(self, name: str, value: int) -> object: ...


class Crew(Service):
    """Valkey, one gateway on a loopback port, and as many workers as the test starts."""

    def __init__(
        self, directory: Path, guard: Guard, parts: list[Part], slots: int, settings: dict[str, Any]
    ) -> None:
        self._guard = guard
        self._place = directory
        self._count = 0
        self._env = {name: value for name, value in os.environ.items() if name[:9] != "ROLLYARD_"}
        self._env |= {
            "ROLLYARD_REDIS_URL": f"unix://{directory}/valkey.sock",
            "ROLLYARD_SLOTS": str(slots),
            "ROLLYARD_TEMPLATES": "bare",
            "ROLLYARD_PORT": "0",
            "TMPDIR": str(directory),
        }
        self._env |= {f"ROLLYARD_{name.upper()}": str(value) for name, value in settings.items()}
        self.parts = parts
        self.workers: list[Part] = []
        self.queue_server = self.start_queue_server()
        self.gateway = self._start("gateway", "rollyard_service")
        self.gateway.said("gateway.listening")
        address: str = self.gateway.events("gateway.listening")[0]["address"]
        pids = {"valkey": self.queue_server.pid, "gateway": self.gateway.pid}
        # There is no supervisor: nothing can grow in it.
        pids["supervisor"] = self.queue_server.pid
        super().__init__(rollyard.Client(address), address, pids, slots, guard.groups)

    @property
    def directory(self) -> Path:
        return self._place

    @property
    def worker_pid(self) -> int:
        """The oldest worker's."""
        return self.workers[0].pid

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.address, timeout=60)

    def start_queue_server(self) -> Part:
        """Start Valkey, also once more after it was killed."""
        socket = self._place / "valkey.sock"
        socket.unlink(missing_ok=True)  # of one that was killed
        self.queue_server = self._start("valkey", "rollyard_queue", "--socket", str(socket))
        assert until(self._answers, timeout_s=START_S)
        return self.queue_server

    def start_workers(self, count: int, *, clock_off_s: int = 0) -> list[Part]:
        """Start workers; return when all are ready."""
        started: list[Part] = []
        for _ in range(count):
            self._count += 1
            name, module = f"worker-{self._count}", "rollyard_sandbox"
            started.append(self._start(name, module, clock_off_s=clock_off_s))
        for one in started:
            one.said("worker.ready")
        self.workers += started
        return started

    def holder(self) -> Part:
        """The worker that runs a program now."""
        holders: list[Part] = []

        def found() -> bool:
            holders[:] = [one for one in self.workers if self.programs_of(one)]
            return bool(holders)

        assert until(found)
        return holders[0]

    def programs_of(self, worker: Part) -> int:
        """How many processes of programs it has."""
        return len(Family(worker.pid).programs)

    def limit_connections(self, count: int) -> None:
        """What the queue's server accepts from now on."""
        with contextlib.closing(self.valkey()) as server:
            cast("_Commands", server).config_set("maxclients", count)

    def stop(self) -> None:
        """Stop everything, workers first; fails if one does not stop well."""
        self.client.close()
        codes = {part.pid: part.stop() for part in reversed(self.parts) if part.exit_code is None}
        assert not any(codes.values()), codes

    def _answers(self) -> bool:
        with contextlib.closing(self.valkey()) as server, contextlib.suppress(redis.RedisError):
            return cast("_Commands", server).ping()
        return False

    def _start(self, name: str, module: str, *arguments: str, clock_off_s: int = 0) -> Part:
        how = [str(_SKEWED), str(clock_off_s), module] if clock_off_s else ["-P", "-m", module]
        with self._guard.inside(), _files_to_open(USUAL_FILES):
            part = Part(self._place, name, [sys.executable, *how, *arguments], self._env)
        self.parts.append(part)
        return part


@contextlib.contextmanager
def _files_to_open(count: int) -> Generator[None]:
    """A soft limit that processes started meanwhile inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def crew(
    name: str, *, workers: int, slots: int, clock_off_s: int = 0, **settings: object
) -> Generator[Crew]:
    """Start the parts in a directory and a guard of their own; on leaving, nothing is left."""
    guard = Guard(name, memory_bytes=GUARD_MEMORY_BYTES, pids=GUARD_PIDS)
    stack = contextlib.ExitStack()
    try:
        with stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-crew-")))
            parts: list[Part] = []
            stack.callback(_end, parts)
            started = Crew(place, guard, parts, slots, settings)
            started.start_workers(workers, clock_off_s=clock_off_s)
            yield started
            started.stop()
    finally:
        guard.close()


def _end(parts: list[Part]) -> None:
    """What is left when a test fails must not stay."""
    for part in reversed(parts):
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.stop()


def until_true(condition: Callable[[], object], timeout_s: float) -> None:
    """Fail unless the condition comes true in time."""
    assert until(lambda: bool(condition()), timeout_s=timeout_s)
