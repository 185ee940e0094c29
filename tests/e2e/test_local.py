"""rollyard.local(): a whole service for a ``with`` block, and nothing after it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_tree import alive, below, until

import rollyard
from rollyard.errors import ServiceStartError
from rollyard.local import LocalService, local


def _directory(service: LocalService) -> Path:
    return Path(service.address.removeprefix("unix://")).parent


def test_a_program_runs_and_nothing_is_left(nothing_left: None) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    service = local(slots=2, templates=["bare"])
    with service as client:
        assert isinstance(client, rollyard.Client)
        directory = _directory(service)
        assert directory.stat().st_mode & 0o777 == 0o700
        result = client.run("print(6 * 7)")
        assert (result.outcome, result.stdout) == ("ok", "42\n")
    assert not directory.exists()
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_the_async_form(nothing_left: None) -> None:
    async def scenario() -> list[str]:
        async with local(slots=2, templates=["bare"]) as client:
            runs = [client.run(f"print({number})") for number in range(10)]
            return [result.stdout for result in await asyncio.gather(*runs)]

    assert asyncio.run(scenario()) == [f"{number}\n" for number in range(10)]


def test_a_body_that_raises_leaves_nothing(nothing_left: None) -> None:
    service = local(slots=1, templates=["bare"])
    with pytest.raises(KeyError, match="mine"), service as client:
        assert client.run("pass").ok
        raise KeyError("mine")
    assert not _directory(service).exists()


def test_cancelled_while_starting_leaves_nothing(nothing_left: None) -> None:
    async def body() -> None:
        async with local(slots=1, templates=["bare"]):
            raise AssertionError("started before it could be cancelled")

    async def scenario() -> None:
        task = asyncio.create_task(body())
        async with asyncio.timeout(30):
            while not any("supervise" in _command(one.pid) for one in below(os.getpid())):
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_a_killed_process_leaves_nothing(nothing_left: None) -> None:
    program = """
import signal
from rollyard.local import local

service = local(slots=1, templates=["bare"])
with service as client:
    client.run("pass")
    print(service.address, flush=True)
    signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        address = owner.stdout.readline().strip()
        family = below(owner.pid)
        assert len(family) >= 4  # supervisor, Valkey, gateway, worker
        owner.send_signal(signal.SIGKILL)
    assert until(lambda: not any(map(alive, family))), [one for one in family if alive(one)]
    assert until(lambda: not Path(address.removeprefix("unix://")).parent.exists())


def test_a_failed_start_says_why(nothing_left: None) -> None:
    with pytest.raises(ServiceStartError, match="worker") as caught:
        local(slots=-1, templates=["bare"]).start()
    assert "slots" in str(caught.value)


def test_the_command_starts_a_service_for_one_run(nothing_left: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollyard.cli", "run", "-", "--local"],
        input="print(2 ** 10)", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1024\n"), done.stderr


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
