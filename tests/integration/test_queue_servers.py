"""Servers that do not do: the message says what to do, within seconds, and the queue recovers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
from cluster import RedisProcess, eventually, free_port

from rollyard_queue.base import QueueUnavailable
from rollyard_queue.connections import Server
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.failures import WrongVersion, check_version
from rollyard_queue.records import FinishedRun, QueuedRun
from rollyard_queue.redis import RedisQueue

SECONDS = 8.0  # an operator who waits longer thinks that it hangs


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def embedded(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(directory=tmp_path, port=free_port()) as server:
        yield server


@pytest.fixture
async def server(embedded: EmbeddedServer) -> AsyncIterator[Server]:
    server = Server.from_url(embedded.url)
    await server.command("PING")
    yield server
    await server.close()


@pytest.fixture
async def queue(embedded: EmbeddedServer) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue.from_url(embedded.url)
    yield queue
    await queue.close()


async def refused(queue: RedisQueue) -> str:
    """What an operator reads when the queue is not ready."""
    async with asyncio.timeout(SECONDS):
        with pytest.raises(QueueUnavailable) as error:
            await queue.ready()
    return str(error.value)


async def recovers(queue: RedisQueue) -> None:
    """Without a restart of anything of ours, and runs pass again."""

    async def is_ready() -> bool:
        await queue.ready()
        return True

    await eventually(is_ready, within_s=SECONDS)
    await queue.submit([QueuedRun("after", b"{}")], reply_to="gw")
    [delivery] = await queue.claim("w", max_runs=1, lease_s=60)
    assert await queue.finish("w", [FinishedRun(delivery.run_id, 1, b"result")]) == [True]


async def test_a_ready_server(queue: RedisQueue):
    await queue.ready()
    await queue.ready()


async def test_a_full_server(queue: RedisQueue, server: Server):
    await queue.ready()
    await server.command("CONFIG", "SET", "maxmemory", 1)
    message = await refused(queue)
    assert "full" in message
    assert "maxmemory" in message
    await queue.ping()  # it answers, and gives results away: those make room
    await server.command("CONFIG", "SET", "maxmemory", 0)
    await recovers(queue)


async def test_a_read_only_server(queue: RedisQueue, server: Server):
    await queue.ready()
    await server.command("REPLICAOF", "127.0.0.1", 1)
    message = await refused(queue)
    assert "read-only replica" in message
    assert "redis+sentinel://" in message
    await server.command("REPLICAOF", "NO", "ONE")
    await recovers(queue)


async def test_a_server_that_wants_a_password(
    embedded: EmbeddedServer, queue: RedisQueue, server: Server
):
    await server.command("CONFIG", "SET", "requirepass", "open sesame")
    assert "user:password@" in await refused(queue)
    place = embedded.url.removeprefix("redis://")
    wrong = RedisQueue.from_url(f"redis://:guess@{place}")
    message = await refused(wrong)
    assert "user:password@" in message
    assert "guess" not in message
    await wrong.close()
    right = RedisQueue.from_url(f"redis://:open%20sesame@{place}")
    await right.ready()
    await right.close()
    await server.command("CONFIG", "SET", "requirepass", "")
    await recovers(queue)


async def test_a_server_that_does_not_let_the_user(
    embedded: EmbeddedServer, queue: RedisQueue, server: Server
):
    await server.command("ACL", "SETUSER", "default", "-evalsha")
    message = await refused(queue)
    assert "access rules" in message
    await server.command("ACL", "SETUSER", "default", "+evalsha")
    await recovers(queue)


async def test_nobody_there(embedded: EmbeddedServer, queue: RedisQueue):
    await queue.ready()
    await embedded.stop()
    message = await refused(queue)
    assert embedded.url.removeprefix("redis://").removesuffix("/0") in message
    assert "ROLLYARD_REDIS_URL" in message
    await embedded.start()
    await recovers(queue)


async def test_a_host_that_does_not_exist():
    queue = RedisQueue.from_url("redis://no-such-host.invalid:6379")
    assert "no-such-host.invalid:6379" in await refused(queue)
    await queue.close()


async def test_something_else_there():
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = cast("int", listening.sockets[0].getsockname()[1])
    queue = RedisQueue.from_url(f"redis://127.0.0.1:{port}")
    assert "no Redis or Valkey" in await refused(queue)
    await queue.close()
    listening.close()
    await listening.wait_closed()


@pytest.mark.parametrize("call", ["submit", "claim", "replies"])
async def test_every_way_in_says_it(server: Server, queue: RedisQueue, call: str):
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "submit": lambda: queue.submit([QueuedRun("a", b"")], reply_to="gw"),
        "claim": lambda: queue.claim("w", max_runs=1, lease_s=1),
        "replies": lambda: queue.replies("gw", max_replies=1, wait_s=1),
    }
    await server.command("CONFIG", "SET", "requirepass", "secret")
    with pytest.raises(QueueUnavailable, match="user:password@"):
        await ways[call]()
    await server.command("CONFIG", "SET", "requirepass", "")
    await ways[call]()


# Old servers


async def test_the_oldest_server_that_will_do(tmp_path: Path):
    old = RedisProcess(tmp_path / "old")
    await old.start()
    info = cast("bytes", await old.ask("INFO", "server"))
    assert b"redis_version:7.0." in info
    queue = RedisQueue.from_url(old.url)
    await recovers(queue)
    await queue.close()
    await old.close()


@pytest.mark.parametrize("version", ["6.2.14", "5.0", "2.8.24"])
def test_a_server_that_is_too_old(version: str):
    info = f"# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n"
    with pytest.raises(WrongVersion, match=rf"Redis {version}, and the queue needs Redis 7\.0"):
        check_version(info.encode(), "the server")


@pytest.mark.parametrize("info", ["redis_version:7.2.4\r\n", "redis_version:10.0.0", "", "\r\n"])
def test_a_server_that_is_new_enough_or_does_not_say(info: str):
    check_version(info.encode(), "the server")
