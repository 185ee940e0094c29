"""``rollyard up``: one command starts a service; however it ends, nothing remains."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from process_tree import Process, alive, below, until

import rollyard


class Up:
    """A running ``rollyard up`` and what it said."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.log = log
        line = process.stdout.readline()
        ready = re.match(r"Rollyard is ready at (.+) \(", line)
        assert ready, log.read_text()
        self.urls = ready[1].split()
        self.url = self.urls[0]

    def family(self) -> set[Process]:
        return below(self.process.pid)

    def part(self, name: str) -> Process:
        """The process of a part, found by what its command line says."""
        marks = {"gateway": "rollyard_service\0", "worker": "rollyard_sandbox\0"}
        for one in self.family():
            if one.parent == self.process.pid:
                is_server = one.name.endswith("-server")  # redis or valkey; it hides its flags
                if is_server if name == "valkey" else marks[name] in _command(one.pid):
                    return one
        raise AssertionError(f"no {name} among {self.family()}")


@pytest.fixture
def start(tmp_path: Path, nothing_left: None) -> Iterator["StartUp"]:
    # Short: below a folder whose name is too long for sockets it would make its own elsewhere.
    with tempfile.TemporaryDirectory() as runtime:
        yield StartUp(tmp_path / "log", Path(runtime))


class StartUp:
    """Starts ``rollyard up`` with a log file and a runtime directory of the test's own."""

    def __init__(self, log: Path, runtime: Path) -> None:
        self.log = log
        self.runtime = runtime
        self.environment = {"XDG_RUNTIME_DIR": str(self.runtime)}

    @contextmanager
    def __call__(self, *arguments: str, stderr: int | None = None) -> Generator[Up]:
        command = [sys.executable, "-m", "rollyard.cli", "up", "--port", "0", "--slots", "1",
                   "--templates", "bare", *arguments]  # fmt: skip
        env = {**os.environ, **self.environment}
        with (
            self.log.open("w") as log,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr or log, text=True, env=env
            ) as process,
        ):
            try:
                yield Up(process, self.log)
            finally:
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_stops_when_asked(start: StartUp, number: signal.Signals) -> None:
    with start() as up:
        with rollyard.Client(up.url) as client:
            assert client.run("print('served')").stdout == "served\n"
        family = up.family()
        worker = up.part("worker")
        assert any(start.runtime.iterdir())
        up.process.send_signal(number)
        assert up.process.wait(60) == 0, start.log.read_text()
        assert not any(map(alive, family))
    assert not any(start.runtime.iterdir())
    assert not _control_groups(worker.pid)


def test_on_a_terminal_the_parts_speak_to_people(start: StartUp) -> None:
    ours, theirs = os.openpty()
    said = b""

    def listen() -> None:
        nonlocal said
        with contextlib.suppress(OSError):  # EIO: the last one at the other end has gone
            while part := os.read(ours, 4096):
                said += part

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen)
        with start(stderr=theirs) as up:
            os.close(theirs)
            up.process.send_signal(signal.SIGTERM)
            assert up.process.wait(60) == 0
        listening.result(30)
    os.close(ours)
    for part in (b"[gateway] ", b"[worker] "):
        assert part in said
    assert b'{"event"' not in said


def test_a_run_in_flight_is_answered_before_it_stops(start: StartUp) -> None:
    with start() as up, rollyard.Client(up.url) as client:
        started = up.family()
        stop = "import time; print('started', flush=True); time.sleep(1); print('finished')"

        def running() -> bool:
            return len(up.family()) > len(started)

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(client.run, stop)
            assert until(running)
            up.process.send_signal(signal.SIGTERM)
            assert future.result(60).stdout == "started\nfinished\n"
        assert up.process.wait(60) == 0


def test_a_killed_supervisor_leaves_no_process(start: StartUp) -> None:
    with start() as up:
        with rollyard.Client(up.url) as client:
            assert client.run("pass").ok
        family = up.family()
        assert len(family) >= 3
        up.process.kill()
        assert until(lambda: not any(map(alive, family))), [one for one in family if alive(one)]
    with start() as up:  # the next one removes the files that a killed one cannot
        assert len(list(start.runtime.iterdir())) == 1


@pytest.mark.parametrize("part", ["gateway", "worker", "valkey"])
def test_a_crashed_part_is_started_again(start: StartUp, part: str) -> None:
    with start() as up:
        crashed = up.part(part)
        os.kill(crashed.pid, signal.SIGKILL)
        assert until(lambda: f"the {part} was killed by signal 9" in start.log.read_text())
        with rollyard.Client(up.url) as client:
            assert client.run("print(1)", deadline_s=60).stdout == "1\n"
        assert up.part(part) != crashed


def test_two_gateways_with_a_key_that_only_its_owner_knows(start: StartUp) -> None:
    digest = hashlib.sha256(b"the key").hexdigest()
    start.environment["ROLLYARD_API_KEYS"] = f"sha256:{digest}"
    with start("--gateways", "2") as up:
        assert len(up.urls) == 2
        for number, url in enumerate(up.urls):
            with rollyard.Client(url, api_key="the key") as client:
                assert client.run(f"print({number})").stdout == f"{number}\n"
            stranger = rollyard.Client(url, api_key="another")
            with stranger, pytest.raises(rollyard.Unauthorized):
                stranger.run("pass")


def test_a_server_of_ones_own_is_used_and_left_alone(start: StartUp, tmp_path: Path) -> None:
    socket = tmp_path / "own.sock"
    with subprocess.Popen(
        [sys.executable, "-m", "rollyard_queue", "--socket", str(socket), "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    ) as server:
        try:
            assert until(socket.exists)
            with start("--redis-url", f"unix://{socket}") as up:
                assert not any(one.name.endswith("-server") for one in up.family())
                with rollyard.Client(up.url) as client:
                    assert client.run("print(1)").stdout == "1\n"
                up.process.terminate()
                assert up.process.wait(60) == 0
            assert server.poll() is None
        finally:
            server.terminate()


def test_a_busy_port_is_said_with_who_has_it_and_what_to_do(start: StartUp) -> None:
    with start() as up:
        port = up.url.rpartition(":")[2]
        holder = up.part("gateway").pid
        second = subprocess.run(
            [sys.executable, "-m", "rollyard.cli", "up", "--port", port, "--templates", "bare"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert second.returncode == 2
        (said,) = second.stderr.splitlines()  # nothing was started, so nothing is stopped
        assert f"port {port}: process {holder} (" in said
        assert "--port" in said


def _control_groups(pid: int) -> list[str]:
    """Groups that are named for a worker, in any hierarchy of the machine."""
    # Not by rglob, which fails when another service's group goes while it looks.
    return [at for at, _, _ in os.walk("/sys/fs/cgroup") if Path(at).name == f"rollyard-{pid}"]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
