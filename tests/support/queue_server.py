"""A real server and queues on it, for tests."""

import json
from typing import cast

from rollyard_queue.connections import Server
from rollyard_queue.records import DIGEST_BYTES
from rollyard_queue.redis import RedisQueue


class Keys:
    """What a queue of one shard has left in its server."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._tag = f"{{{name}:0}}:"

    async def all(self) -> set[str]:
        """Every key of the queue, without its tag."""
        keys = cast("list[bytes]", await self._server.command("KEYS", self._tag + "*"))
        return {key.decode().removeprefix(self._tag) for key in keys}

    async def lasting(self) -> set[str]:
        """Those that no time to live will remove."""
        return {key for key in await self.all() if await self.ttl_ms(key) == -1}

    async def ttl_ms(self, key: str) -> int:
        return cast("int", await self._server.command("PTTL", self._tag + key))

    async def state(self, run_id: str) -> str:
        """``queued``, ``running``, ``done`` or ``unknown``, looked up without the queue."""
        if await self._has("owners", run_id):
            return "running"
        if await self._has("runs", run_id):
            return "queued"
        return "unknown" if await self.result(run_id) is None else "done"

    async def result(self, run_id: str) -> bytes | None:
        """The result that is kept for late duplicates."""
        for key in await self.all():
            if key.startswith("done:"):
                value = await self._server.command("HGET", self._tag + key, run_id)
                if value is not None:
                    stored = cast("bytes", value)
                    return stored[1 + DIGEST_BYTES :] if stored[:1] in (b"+", b"D") else stored
        return None

    async def holds_payload(self, run_id: str) -> bool:
        return await self._has("payloads", run_id)

    async def replies(self, gateway: str) -> list[tuple[str, bytes]]:
        """The results that a gateway has not acknowledged, oldest first; read without taking."""
        answer = await self._server.command("XRANGE", f"{self._tag}replies:{gateway}", "-", "+")
        sent: list[tuple[str, bytes]] = []
        for _, (index, results) in cast("list[tuple[bytes, tuple[bytes, bytes]]]", answer):
            ids = index.decode().split(" ")
            for run_id, size in zip(ids[::2], map(int, ids[1::2]), strict=True):
                sent.append((run_id, results[:size]))
                results = results[size:]
        return sent

    async def _has(self, key: str, run_id: str) -> bool:
        return bool(await self._server.command("HEXISTS", self._tag + key, run_id))


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
