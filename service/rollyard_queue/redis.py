"""The queue on Redis ≥7.2 or Valkey ≥8: shards of it, each on a server of its own or together."""

from collections.abc import Sequence
from typing import Self, override

from rollyard_queue.base import Queue
from rollyard_queue.bounds import Bounds
from rollyard_queue.connections import Server
from rollyard_queue.records import (
    Delivery,
    FinishedRun,
    Notice,
    QueuedRun,
    QueueStats,
    Reply,
    SubmitReceipt,
)
from rollyard_queue.shard import MAX_BATCH, Shard


class RedisQueue(Queue):
    """A queue that any number of gateways and workers share.

    Args of ``from_url``: ``name`` separates queues on one server; ``max_queued`` and
    ``max_queued_bytes`` bound what waits (not what runs); ``max_attempts`` deliveries end a run
    with ``infra_error``; ``result_ttl_s`` seconds a result is kept for late duplicates. All
    processes of one queue must agree on them.
    """

    def __init__(self, server: Server, *, name: str = "rollyard", bounds: Bounds) -> None:
        if not name or set(name) & set("{}"):
            raise ValueError(f"queue name {name!r} must not be empty nor have braces")
        self._server = server
        self._shards = [Shard(server, tag=f"{{{name}:0}}:", bounds=bounds)]

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        name: str = "rollyard",
        max_queued: int = 100_000,
        max_queued_bytes: int = 1 << 30,
        max_queued_per_job: int = 0,
        max_queued_bytes_per_job: int = 0,
        max_running_per_job: int = 0,
        max_attempts: int = 3,
        result_ttl_s: float = 60,
    ) -> Self:
        return cls(
            Server.from_url(url),
            name=name,
            bounds=Bounds(
                max_queued=max_queued,
                max_queued_bytes=max_queued_bytes,
                max_queued_per_job=max_queued_per_job,
                max_queued_bytes_per_job=max_queued_bytes_per_job,
                max_running_per_job=max_running_per_job,
                max_attempts=max_attempts,
                result_ttl_s=result_ttl_s,
            ),
        )

    @override
    async def submit(self, runs: Sequence[QueuedRun], *, reply_to: str) -> list[SubmitReceipt]:
        if not runs:
            return []
        if len(runs) > MAX_BATCH:
            raise ValueError(f"a batch has at most {MAX_BATCH} runs, not {len(runs)}")
        if not reply_to or "\n" in reply_to:
            raise ValueError("reply_to must be one line and not empty")
        return await self._shards[0].submit(runs, reply_to=reply_to)

    @override
    async def cancel(self, run_ids: Sequence[str], *, abandon_by: str | None = None) -> list[str]:
        return await self._shards[0].cancel(run_ids, abandon_by=abandon_by)

    @override
    async def wait(self, worker_id: str, *, for_work: bool, wait_s: float) -> Notice:
        return await self._shards[0].wait(worker_id, for_work=for_work, wait_s=wait_s)

    @override
    async def claim(self, worker_id: str, *, max_runs: int, lease_s: float) -> list[Delivery]:
        return await self._shards[0].claim(worker_id, max_runs=max_runs, lease_s=lease_s)

    @override
    async def renew(self, worker_id: str, run_ids: Sequence[str], *, lease_s: float) -> list[str]:
        return await self._shards[0].renew(worker_id, run_ids, lease_s=lease_s)

    @override
    async def finish(self, worker_id: str, finished: Sequence[FinishedRun]) -> list[bool]:
        return await self._shards[0].finish(worker_id, finished)

    @override
    async def release(self, worker_id: str, run_ids: Sequence[str]) -> int:
        return await self._shards[0].release(worker_id, run_ids)

    @override
    async def announce(self, worker_id: str, *, slots: int, ttl_s: float) -> None:
        await self._shards[0].announce(worker_id, slots=slots, ttl_s=ttl_s)

    @override
    async def retire(self, worker_id: str) -> None:
        await self._shards[0].retire(worker_id)

    @override
    async def reap(self) -> int:
        return await self._shards[0].reap()

    @override
    async def replies(self, reply_to: str, *, max_replies: int, wait_s: float) -> list[Reply]:
        return await self._shards[0].replies(reply_to, max_replies=max_replies, wait_s=wait_s)

    @override
    async def stats(self) -> QueueStats:
        return await self._shards[0].stats()

    @override
    async def ping(self) -> None:
        await self._server.command("PING")

    @override
    async def close(self) -> None:
        try:
            await self._shards[0].close()
        finally:
            await self._server.close()
