"""Connections to Redis or Valkey: whole commands or a dropped connection, never a half-read one.

redis-py 8 retries a command ten times by default and gives every read five seconds. Here nothing
is retried, because a script whose answer was lost may have run, and a blocking read has no limit
but its own.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol, Self, cast
from urllib.parse import urlsplit

import hiredis
from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from rollyard_queue.base import QueueUnavailable
from rollyard_queue.failures import as_queue_error, check_version
from rollyard_queue.scripts import Script

type Argument = bytes | str | int | float
type Answer = int | bytes | list[Answer] | None

COMMAND_TIMEOUT_S = 5.0  # a script over 1,024 runs takes about 10 ms
CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 8  # the server runs one script at a time; more only queue there
POOL_WAIT_S = 10.0
BLOCK_MARGIN_S = 5.0  # a blocking read that is this late has lost its server

_INFO = ("INFO", "server")

# hiredis' own annotation takes a tuple of one.
_pack = cast("Callable[[tuple[Argument, ...]], bytes]", hiredis.pack_command)  # pyright: ignore[reportUnknownMemberType]


class Connection(Protocol):
    """What is used of redis-py's connection, whose own annotations are partial."""

    async def send_packed_command(self, command: list[bytes]) -> None: ...
    async def read_response(self) -> Answer: ...
    async def disconnect(self, nowait: bool = False) -> None: ...


class _Pool(Protocol):
    async def get_connection(self) -> Connection: ...
    async def release(self, connection: Connection) -> None: ...
    async def aclose(self) -> None: ...


class _MakePool(Protocol):
    def __call__(self, url: str, **options: object) -> _Pool: ...


class Node(Protocol):
    """Where a shard lives: one server, or whichever has it at the moment.

    Every method raises QueueUnavailable where the command may or may not have run, and QueueError
    where the server refused it.
    """

    async def command(self, *command: Argument) -> Answer:
        """Run one command to its end, also where the caller is cancelled meanwhile."""
        ...

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        *,
        patient: bool = True,
    ) -> Answer:
        """Run one script to its end; load it where the server does not know it.

        Where a cluster moves the shard, who is not ``patient`` hears SlotMoving at once.
        """
        ...

    async def block(self, commands: Sequence[Sequence[Argument]], *, wait_s: float) -> list[Answer]:
        """Send commands together, the last of which may block for ``wait_s``; all the answers."""
        ...


class Server:
    """One server: a few connections for commands, and one more for each blocking read."""

    def __init__(self, commands: _Pool, blocking: _Pool, *, where: str) -> None:
        """``where`` names the server in messages."""
        self.where = where
        self._commands = commands
        self._blocking = blocking
        self._known = False  # that it is new enough
        self._in_flight: set[asyncio.Task[Answer]] = set()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Make the pools; nothing is connected yet.

        Raises:
            ValueError: the URL's scheme is none of redis, rediss and unix.
        """
        never = Retry(NoBackoff(), 0)
        # redis-py leaves its keyword options untyped, and its connections' methods in part.
        commands = cast("_MakePool", BlockingConnectionPool.from_url)(  # pyright: ignore[reportUnknownMemberType]
            url,
            protocol=2,  # the same flat answers from every server
            retry=never,
            socket_timeout=COMMAND_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            max_connections=MAX_CONNECTIONS,
            timeout=POOL_WAIT_S,
        )
        blocking = cast("_MakePool", ConnectionPool.from_url)(  # pyright: ignore[reportUnknownMemberType]
            url,
            protocol=2,
            retry=never,
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
        )
        return cls(commands, blocking, where=f"the queue's server at {_place(url)}")

    async def command(self, *command: Argument) -> Answer:
        """Run one command to its end, also where the caller is cancelled meanwhile.

        Raises:
            QueueUnavailable: it may or may not have run.
            QueueError: the server refused it.
        """
        return await self._to_the_end(_once(self._commands, command))

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        *,
        patient: bool = True,
    ) -> Answer:
        """Run one script to its end; load it where the server does not know it.

        It never waits for a move, so that ``patient`` changes nothing.

        Raises:
            QueueUnavailable: it may or may not have run.
            QueueError: the script failed.
        """
        return await self._to_the_end(self._run(script, keys, arguments))

    async def block(self, commands: Sequence[Sequence[Argument]], *, wait_s: float) -> list[Answer]:
        """Send commands together, the last of which may block for ``wait_s``; all the answers.

        When the caller is cancelled the connection is dropped, and the server forgets the read.

        Raises:
            QueueUnavailable: no answer came; the commands may or may not have run.
        """
        try:
            if not self._known:
                await self.command("PING")
            async with asyncio.timeout(wait_s + BLOCK_MARGIN_S):
                connection = await self._blocking.get_connection()
                try:
                    await connection.send_packed_command(_packed(commands))
                    return [await connection.read_response() for _ in commands]
                except BaseException:
                    await connection.disconnect(nowait=True)
                    raise
                finally:
                    await self._blocking.release(connection)
        except TimeoutError:
            raise QueueUnavailable(f"{self.where} stopped answering") from None
        except (RedisError, OSError) as error:
            raise as_queue_error(error, self.where) from error

    async def close(self) -> None:
        """Let commands under way end, then close every connection."""
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        await self._commands.aclose()
        await self._blocking.aclose()

    async def _to_the_end(self, operation: Coroutine[object, None, Answer]) -> Answer:
        # Cancelled between request and answer, a claim would leave runs that nobody knows of until
        # their lease ends; so the task goes on, and only its answer is dropped.
        task = asyncio.create_task(self._known_first(operation))
        self._in_flight.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except (RedisError, OSError) as error:
            raise as_queue_error(error, self.where) from error

    async def _known_first(self, operation: Coroutine[object, None, Answer]) -> Answer:
        """Look once at what answers there: an old server fails in ways that tell nobody why."""
        if not self._known:
            try:
                check_version(cast("bytes", await _once(self._commands, _INFO)), self.where)
            except BaseException:
                operation.close()
                raise
            self._known = True
        return await operation

    def _forget(self, task: asyncio.Task[Answer]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()  # read here, or a cancelled caller leaves a warning behind

    async def _run(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> Answer:
        call = ("EVALSHA", script.sha, len(keys), *keys, *arguments)
        try:
            return await _once(self._commands, call)
        except NoScriptError:
            await _once(self._commands, ("SCRIPT", "LOAD", script.source))
            return await _once(self._commands, call)


def _place(url: str) -> str:
    """Host and port, or path, of a URL: what may be said in a message."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def _packed(commands: Sequence[Sequence[Argument]]) -> list[bytes]:
    # By hiredis: 0.3 µs for the four arguments of a run, where redis-py's own packer takes 2.8.
    return [_pack(tuple(command)) for command in commands]


async def _once(pool: _Pool, command: Sequence[Argument]) -> Answer:
    connection = await pool.get_connection()
    try:
        await connection.send_packed_command(_packed((command,)))
        return await connection.read_response()
    finally:
        await pool.release(connection)
