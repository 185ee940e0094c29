"""A real server and queues on it, for tests."""

import json
from typing import cast

from rollyard_queue.connections import Server
from rollyard_queue.redis import RedisQueue


class Keys:
    """What a queue has left in its server."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._tag = f"{{{name}}}:"

    async def all(self) -> set[str]:
        """Every key of the queue, without its tag."""
        keys = cast("list[bytes]", await self._server.command("KEYS", self._tag + "*"))
        return {key.decode().removeprefix(self._tag) for key in keys}

    async def lasting(self) -> set[str]:
        """Those that no time to live will remove."""
        return {key for key in await self.all() if await self.ttl_ms(key) == -1}

    async def ttl_ms(self, key: str) -> int:
        return cast("int", await self._server.command("PTTL", self._tag + key))

    async def field(self, key: str, name: str) -> str | None:
        value = cast("bytes | None", await self._server.command("HGET", self._tag + key, name))
        return None if value is None else value.decode()

    async def replies(self, gateway: str, last: int) -> list[tuple[str, bytes]]:
        """The last results sent to a gateway, oldest first; read without taking them."""
        if not last:
            return []
        answer = await self._server.command(
            "XREVRANGE", f"{self._tag}replies:{gateway}", "+", "-", "COUNT", last
        )
        entries = cast("list[tuple[bytes, list[bytes]]]", answer)
        return [(fields[1].decode(), fields[3]) for _, fields in reversed(entries)]


async def server_time_us(server: Server) -> int:
    seconds, micros = cast("list[bytes]", await server.command("TIME"))
    return int(seconds) * 1_000_000 + int(micros)


async def until_ms_passed(server: Server, ms: int) -> None:
    """Ask the server for its time until it is later: no clock but the server's decides."""
    end = await server_time_us(server) + ms * 1000
    while await server_time_us(server) <= end:
        pass


async def lapse(queue: RedisQueue, worker_id: str, run_id: str) -> None:
    """End a lease as if its worker had been silent for too long."""
    assert await queue.renew(worker_id, [run_id], lease_s=0) == []


def outcome(result: bytes) -> str:
    return cast("dict[str, str]", json.loads(result))["outcome"]
