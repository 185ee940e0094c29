"""Several servers of Debian's redis-server on loopback: a cluster, or a primary with a sentinel.

The binary is Debian 12's, Redis 7.0.15: the oldest that the queue takes.
"""

import asyncio
import contextlib
import shutil
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

from rollyard_queue.base import QueueError
from rollyard_queue.connections import Answer, Server

SLOTS = 16384
NODE_TIMEOUT_MS = 700  # then a node that does not answer counts as failed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast("int", probe.getsockname()[1])


async def eventually(condition: Callable[[], Awaitable[bool]], *, within_s: float = 30) -> None:
    """Ask until it is so; a server that does not answer yet is asked again."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(QueueError):
                if await condition():
                    return
            await asyncio.sleep(0.02)


class RedisProcess:
    """One server, in a directory of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        directory.mkdir()
        self.directory = directory
        self.port = free_port()
        self.bus_port = free_port()  # between the nodes of a cluster
        self.url = f"redis://127.0.0.1:{self.port}"
        self.server = Server.from_url(self.url)
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        binary = shutil.which("redis-server")
        assert binary is not None, "scripts/test installs redis-server"
        self._process = await asyncio.create_subprocess_exec(
            *(binary, *self._options, "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.directory), "--save", "", "--daemonize", "no"),
            *(
                ("--cluster-port", str(self.bus_port))
                if "--cluster-enabled" in self._options
                else ()
            ),
            cwd=self.directory,
            stdout=asyncio.subprocess.DEVNULL,
        )
        await eventually(self._answers)

    async def ask(self, *command: str | int) -> Answer:
        return await self.server.command(*command)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await process.wait()

    async def close(self) -> None:
        await self.kill()
        await self.server.close()

    async def _answers(self) -> bool:
        return await self.ask("PING") == b"PONG"


class RedisCluster:
    """Primaries that share the slots, and one replica of the first of them."""

    def __init__(self, primaries: Sequence[RedisProcess], replica: RedisProcess) -> None:
        self.primaries = primaries
        self.replica = replica

    @property
    def url(self) -> str:
        """Named by all of its primaries."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.primaries)
        return f"redis+cluster://{hosts}"

    async def start(self) -> None:
        nodes = [*self.primaries, self.replica]
        await asyncio.gather(*(node.start() for node in nodes))
        bounds = [SLOTS * i // len(self.primaries) for i in range(len(self.primaries) + 1)]
        for node, first, end in zip(self.primaries, bounds, bounds[1:], strict=False):
            await node.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node in nodes[1:]:
            await node.ask("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].bus_port)
        first_id = cast("bytes", await nodes[0].ask("CLUSTER", "MYID")).decode()

        async def follows() -> bool:
            await self.replica.ask("CLUSTER", "REPLICATE", first_id)
            return True

        await eventually(follows)

        async def complete() -> bool:
            infos = [cast("bytes", await node.ask("CLUSTER", "INFO")) for node in nodes]
            link = cast("bytes", await self.replica.ask("INFO", "replication"))
            return (
                all(b"cluster_state:ok" in info for info in infos)
                and all(f"known_nodes:{len(nodes)}".encode() in info for info in infos)
                and b"master_link_status:up" in link
            )

        await eventually(complete)

    async def primary_with_a_replica(self) -> RedisProcess:
        """Of the first part of the slots; it changes with each failover."""
        first = self.primaries[0]
        return first if await self._is_primary(first) else self.replica

    async def fail_over(self) -> None:
        """Primary and replica change places; both go on."""
        first, second = self.primaries[0], self.replica
        replica = second if await self._is_primary(first) else first
        await replica.ask("CLUSTER", "FAILOVER")
        await eventually(lambda: self._is_primary(replica))

    async def begin_to_move(self, slot: int) -> "SlotMove":
        """To another primary, as an operator's resharding does; its keys are moved later."""
        ranges = cast(
            "list[tuple[int, int, list[Answer]]]", await self.primaries[-1].ask("CLUSTER", "SLOTS")
        )
        [port] = [primary[1] for first, last, primary, *_ in ranges if first <= slot <= last]
        nodes = [await self.primary_with_a_replica(), *self.primaries[1:]]
        [source] = [node for node in nodes if node.port == port]
        others = [node for node in nodes if node is not source]
        move = SlotMove(slot, source, others)
        await move.begin()
        return move

    async def _is_primary(self, node: RedisProcess) -> bool:
        return b"role:master" in cast("bytes", await node.ask("INFO", "replication"))

    async def keys(self) -> set[bytes]:
        """All keys of all primaries that are up."""
        found: set[bytes] = set()
        for node in (*self.primaries, self.replica):
            with contextlib.suppress(QueueError):
                found |= set(cast("list[bytes]", await node.ask("KEYS", "*")))
        return found

    async def close(self) -> None:
        for node in (*self.primaries, self.replica):
            await node.close()


class SlotMove:
    """One slot on its way from a primary to another, key by key: CLUSTER SETSLOT and MIGRATE."""

    def __init__(self, slot: int, source: RedisProcess, others: Sequence[RedisProcess]) -> None:
        """``others`` are the other primaries, to the first of which it goes."""
        self._slot = slot
        self._source = source
        self._target = others[0]
        self._others = others

    async def refusals(self) -> int:
        """How many commands the source has refused because of this or an earlier move."""
        info = cast("bytes", await self._source.ask("INFO", "errorstats"))
        return sum(
            int(line.split(b"count=")[1])
            for line in info.splitlines()
            if line.startswith((b"errorstat_ASK:", b"errorstat_TRYAGAIN:"))
        )

    async def begin(self) -> None:
        """From now on what is not at the source is looked for at the target."""
        source, target = await self._id(self._source), await self._id(self._target)
        await self._target.ask("CLUSTER", "SETSLOT", self._slot, "IMPORTING", source)
        await self._source.ask("CLUSTER", "SETSLOT", self._slot, "MIGRATING", target)

    async def move_a_key(self) -> bool:
        """Whether there was one."""
        keys = cast(
            "list[bytes]", await self._source.ask("CLUSTER", "GETKEYSINSLOT", self._slot, 1)
        )
        for key in keys:
            answer = await self._source.ask(
                *("MIGRATE", "127.0.0.1", self._target.port, key.decode(), 0, 5000)
            )
            assert answer in (b"OK", b"NOKEY")  # it may end or expire meanwhile
        return bool(keys)

    async def end(self) -> None:
        """Move the rest, and tell all primaries whose the slot is."""
        while await self.move_a_key():
            pass
        target = await self._id(self._target)
        for node in (self._target, self._source, *self._others[1:]):
            await node.ask("CLUSTER", "SETSLOT", self._slot, "NODE", target)

    async def give_up(self) -> None:
        """Before any key has moved."""
        for node in (self._source, self._target):
            await node.ask("CLUSTER", "SETSLOT", self._slot, "STABLE")

    async def _id(self, node: RedisProcess) -> str:
        return cast("bytes", await node.ask("CLUSTER", "MYID")).decode()


@contextlib.asynccontextmanager
async def redis_cluster(directory: Path) -> AsyncGenerator[RedisCluster]:
    """Three primaries and a replica."""
    options = (
        *("--cluster-enabled", "yes", "--appendonly", "no"),
        *("--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-replica-validity-factor", "0"),
    )
    nodes = [RedisProcess(directory / f"node{i}", *options) for i in range(4)]
    cluster = RedisCluster(nodes[:3], nodes[3])
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


class WatchedPair:
    """A primary and its replica, watched by one sentinel."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.primary = RedisProcess(directory / "primary")
        self.replica = RedisProcess(
            directory / "replica", "--replicaof", f"127.0.0.1 {self.primary.port}"
        )
        self.sentinel: RedisProcess | None = None

    @property
    def url(self) -> str:
        assert self.sentinel is not None
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/watched"

    async def start(self) -> None:
        await self.primary.start()
        await self.replica.start()
        await eventually(self._follows)
        configuration = self._directory / "sentinel.conf"
        configuration.write_text(
            f"sentinel monitor watched 127.0.0.1 {self.primary.port} 1\n"
            f"sentinel down-after-milliseconds watched {NODE_TIMEOUT_MS}\n"
            "sentinel failover-timeout watched 5000\n"
        )
        self.sentinel = RedisProcess(self._directory / "sentinel", str(configuration), "--sentinel")
        await self.sentinel.start()
        await eventually(self._knows_the_replica)

    async def close(self) -> None:
        for one in (self.sentinel, self.replica, self.primary):
            if one is not None:
                await one.close()

    async def _follows(self) -> bool:
        info = cast("bytes", await self.replica.ask("INFO", "replication"))
        return b"master_link_status:up" in info

    async def _knows_the_replica(self) -> bool:
        assert self.sentinel is not None
        return b"slaves=1" in cast("bytes", await self.sentinel.ask("INFO", "sentinel"))


@contextlib.asynccontextmanager
async def watched_pair(directory: Path) -> AsyncGenerator[WatchedPair]:
    pair = WatchedPair(directory)
    try:
        await pair.start()
        yield pair
    finally:
        await pair.close()
