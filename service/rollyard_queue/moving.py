"""Places that move: a cluster's shards and a sentinel's primary are looked up, and looked up again.

Layer: a :class:`Node` on whichever :class:`Server` has the shard now. A command that a server did
not begin (MOVED, a demoted primary) is sent once more, to where the shard is; one that may have
run is not, and its caller hears QueueUnavailable as from any server. The next call looks again, so
a failover needs nobody's help.

While a cluster moves a slot (ASK, TRYAGAIN), calls wait for the end of the move; where it does not
end, only the first ones wait, and whoever comes later hears QueueUnavailable at once. The other
node, asked with ASKING, could not help: a command with several keys, as every script is, runs on
neither side before all its keys are there. Each script names a key that never exists (``absent``
in ``prelude.lua``), so that the server refuses it before its first step and never in between.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast, override

from rollyard_queue.base import QueueError, QueueUnavailable
from rollyard_queue.connections import Answer, Argument, Node, Server
from rollyard_queue.failures import SlotMoving, WrongPlace
from rollyard_queue.scripts import Script

MOVE_WAIT_S = 5.0
"""A slot that moves for longer makes its part of the queue unavailable; one takes milliseconds.

Counted from the first call that met the move, whoever made it."""
MOVE_PAUSE_S = (0.005, 0.1)
"""First and longest pause between two looks whether it has moved; each doubles."""
LOOKUP_S = 2.0
"""A seed or sentinel that takes longer is passed over."""


class Directory(Protocol):
    """Knows which server has what."""

    async def find(
        self, slot: int, *, but: Server | None, to: tuple[str, int] | None = None
    ) -> Server:
        """The server of a slot; ``but`` is the one that had it and failed, and said ``to`` whom.

        Raises:
            QueueUnavailable: nobody knows.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class MovingNode(Node):
    """One slot, wherever it is."""

    def __init__(self, directory: Directory, slot: int) -> None:
        self._directory = directory
        self._slot = slot
        self._server: Server | None = None
        self._lost: Server | None = None
        self._moving_since: float | None = None  # by the loop's clock; the first call that met it

    @override
    async def command(self, *command: Argument) -> Answer:
        return await self._there(lambda server: server.command(*command))

    @override
    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        *,
        patient: bool = True,
    ) -> Answer:
        answer = await self._there(
            lambda server: server.run(script, keys, arguments), patient=patient
        )
        # Only a script proves it, by the key that is absent: of a slot that moves, a command on a
        # key that has not left yet is answered too, and so is one without a key.
        self._moving_since = None
        return answer

    @override
    async def block(self, commands: Sequence[Sequence[Argument]], *, wait_s: float) -> list[Answer]:
        return await self._there(lambda server: server.block(commands, wait_s=wait_s))

    async def _there[T](self, call: Callable[[Server], Awaitable[T]], *, patient: bool = True) -> T:
        server = self._server or await self._find(self._lost)
        try:
            return await self._when_moved(server, call, patient=patient)
        except WrongPlace as error:
            server = await self._find(server, error.to)
        except QueueUnavailable as error:
            self._lose(server, error)
            raise
        try:
            return await self._when_moved(server, call, patient=patient)
        except QueueUnavailable as error:
            self._lose(server, error)
            raise

    async def _when_moved[T](
        self, server: Server, call: Callable[[Server], Awaitable[T]], *, patient: bool
    ) -> T:
        """Call, and where that is wanted call again while the slot is on its way."""
        now = asyncio.get_running_loop().time
        pause_s, longest_s = MOVE_PAUSE_S
        while True:
            try:
                return await call(server)
            except SlotMoving:
                if self._moving_since is None:
                    self._moving_since = now()
                if not patient or now() >= self._moving_since + MOVE_WAIT_S:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _find(self, but: Server | None, to: tuple[str, int] | None = None) -> Server:
        self._server = await self._directory.find(self._slot, but=but, to=to)
        self._lost = None
        return self._server

    def _lose(self, server: Server, error: QueueUnavailable) -> None:
        # Whoever says that the slot is on its way still has it.
        if self._server is server and not isinstance(error, SlotMoving):
            self._server, self._lost = None, server


class Cluster:
    """A Redis Cluster, known through any of its nodes."""

    def __init__(self, seeds: Sequence[str], *, url_of: Callable[[str, int], str]) -> None:
        """``seeds`` are URLs of nodes; ``url_of`` makes one of a host and port."""
        self._url_of = url_of
        self._servers = {url: Server.from_url(url) for url in seeds}
        self._slots: list[tuple[int, int, str]] = []  # first, last, URL of the primary
        self._looking = asyncio.Lock()
        self._looks = 0

    async def find(
        self, slot: int, *, but: Server | None, to: tuple[str, int] | None = None
    ) -> Server:
        if to is not None:
            return self._at(self._url_of(*to))  # others may not have heard of a move yet
        looks = self._looks
        if not self._slots or but is not None or self._server(slot) is None:
            await self._look(looks)
        server = self._server(slot)
        if server is None:
            raise QueueUnavailable(
                f"no node of the cluster serves slot {slot}: see CLUSTER INFO on one of them"
            )
        return server

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()

    def _server(self, slot: int) -> Server | None:
        for first, last, url in self._slots:
            if first <= slot <= last:
                return self._at(url)
        return None

    def _at(self, url: str) -> Server:
        if url not in self._servers:
            self._servers[url] = Server.from_url(url)
        return self._servers[url]

    async def _look(self, looks: int) -> None:
        async with self._looking:
            if self._looks != looks:
                return  # somebody looked while this one waited
            self._looks += 1
            reasons: list[str] = []
            for url, server in list(self._servers.items()):
                try:
                    async with asyncio.timeout(LOOKUP_S):
                        answer = await server.command("CLUSTER", "SLOTS")
                except (QueueError, TimeoutError) as error:
                    reasons.append(str(error) or "no answer in time")
                else:
                    self._slots = self._read(cast("list[list[Answer]]", answer), url)
                    return
            raise QueueUnavailable(f"no node of the cluster answers: {'; '.join(reasons)}")

    def _read(self, answer: list[list[Answer]], asked: str) -> list[tuple[int, int, str]]:
        slots: list[tuple[int, int, str]] = []
        for first, last, primary, *_ in answer:
            host, port = cast("tuple[bytes | None, int]", cast("list[Answer]", primary)[:2])
            # A node that does not know its own address leaves it out: it is the one that was asked.
            url = self._url_of(host.decode(), port) if host else asked
            slots.append((cast("int", first), cast("int", last), url))
        return slots


class Sentinels:
    """The primary that Redis Sentinel names."""

    def __init__(
        self, seeds: Sequence[str], *, name: str, url_of: Callable[[str, int], str]
    ) -> None:
        """``seeds`` are URLs of sentinels, ``name`` is the monitored primary's."""
        self._name = name
        self._url_of = url_of
        self._sentinels = [Server.from_url(url) for url in seeds]
        self._servers: dict[str, Server] = {}

    async def find(
        self, slot: int, *, but: Server | None, to: tuple[str, int] | None = None
    ) -> Server:
        reasons: list[str] = []
        for sentinel in self._sentinels:
            try:
                async with asyncio.timeout(LOOKUP_S):
                    answer = await sentinel.command(
                        "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name
                    )
            except (QueueError, TimeoutError) as error:
                reasons.append(str(error) or "no answer in time")
                continue
            if answer is None:
                reasons.append(f"{sentinel.where} knows no primary named {self._name!r}")
                continue
            host, port = cast("tuple[bytes, bytes]", answer)
            url = self._url_of(host.decode(), int(port))
            if url not in self._servers:
                self._servers[url] = Server.from_url(url)
            return self._servers[url]
        raise QueueUnavailable(f"no sentinel names the primary: {'; '.join(reasons)}")

    async def close(self) -> None:
        for server in (*self._sentinels, *self._servers.values()):
            await server.close()
