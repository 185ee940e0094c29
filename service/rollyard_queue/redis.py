"""The queue on Redis ≥7.2 or Valkey ≥8: one Lua script, one round trip, for each batch.

Layer: between the contract (``base``) and the server (``connections``, ``lua/``). Promises beyond
the contract:

- ``finish``, ``renew``, ``release``, ``cancel``, ``reap`` and ``submit`` may be repeated after
  QueueUnavailable; a claim whose answer was lost is redelivered when its lease ends.
- ``replies`` reads without removing, and removes what it handed out when it is called again: a
  connection that breaks loses no result.
- A lost notice of ``wait`` costs time only: ``renew`` names what is no longer held, and ``reap``
  repairs lost wake-ups.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Self, cast, override

from rollyard_queue.base import Queue, QueueFull
from rollyard_queue.connections import Answer, Argument, Server
from rollyard_queue.listening import Listener, Source
from rollyard_queue.records import (
    Delivery,
    FinishedRun,
    Notice,
    QueuedRun,
    QueueStats,
    Reply,
    SubmitReceipt,
)
from rollyard_queue.scripts import ScriptName, script

MAX_BATCH = 1024  # runs in one script: about 10 ms in which the server does nothing else
REAP_BATCH = 256
MAX_BLOCK_S = 60.0  # longer waits are cut, so that a dead connection is noticed

SHARED_KEYS = ("load", "ring", "leases", "deadlines", "wake", "totals", "workers", "slots")


class RedisQueue(Queue):
    """A queue that any number of gateways and workers share.

    Args of ``from_url``: ``name`` separates queues on one server; ``max_queued`` and
    ``max_queued_bytes`` bound what waits (not what runs); ``max_attempts`` deliveries end a run
    with ``infra_error``; ``result_ttl_s`` seconds a result is kept for late duplicates. All
    processes of one queue must agree on them.
    """

    def __init__(
        self,
        server: Server,
        *,
        name: str = "rollyard",
        max_queued: int = 100_000,
        max_queued_bytes: int = 1 << 30,
        max_attempts: int = 3,
        result_ttl_s: float = 60,
    ) -> None:
        if not name or set(name) & set("{}"):
            raise ValueError(f"queue name {name!r} must not be empty nor have braces")
        self._server = server
        self._tag = f"{{{name}}}:"
        self._keys = [self._tag + key for key in SHARED_KEYS]
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._max_attempts = max_attempts
        self._result_ttl_ms = max(1, round(result_ttl_s * 1000))
        # Per reply list: entries handed out, and removed from the server at the next call.
        self._handed_out: dict[str, list[bytes]] = {}
        self._readers: dict[str, asyncio.Lock] = {}
        self._listeners: dict[str, Listener] = {}

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        name: str = "rollyard",
        max_queued: int = 100_000,
        max_queued_bytes: int = 1 << 30,
        max_attempts: int = 3,
        result_ttl_s: float = 60,
    ) -> Self:
        """Make a queue on ``redis://host:port/db``, ``rediss://…`` or ``unix:///path``.

        Nothing is connected before the first call.

        Raises:
            ValueError: the URL or the name is malformed.
        """
        return cls(
            Server.from_url(url),
            name=name,
            max_queued=max_queued,
            max_queued_bytes=max_queued_bytes,
            max_attempts=max_attempts,
            result_ttl_s=result_ttl_s,
        )

    @override
    async def submit(self, runs: Sequence[QueuedRun], *, reply_to: str) -> list[SubmitReceipt]:
        """See Queue.submit. Results may reach ``replies`` before this returns.

        Raises:
            QueueFull: nothing of the batch was queued.
            ValueError: more than 1,024 runs, or ``reply_to`` is not one line.
        """
        if not runs:
            return []
        if len(runs) > MAX_BATCH:
            raise ValueError(f"a batch has at most {MAX_BATCH} runs, not {len(runs)}")
        if not reply_to or "\n" in reply_to:
            raise ValueError("reply_to must be one line and not empty")
        arguments: list[Argument] = [reply_to, self._max_queued, self._max_queued_bytes]
        for run in runs:
            expires = "" if run.expires_in_ms is None else run.expires_in_ms
            arguments += (run.run_id, run.payload, run.job, expires)
        answer = cast("list[Answer]", await self._run("submit", *arguments))
        if answer[0] == b"full":
            wait_s, queued, queued_bytes = cast("tuple[bytes, int, int]", answer[1:])
            raise QueueFull(
                f"the queue holds {queued} runs ({queued_bytes} bytes of at most "
                f"{self._max_queued_bytes}) of at most {self._max_queued}; "
                f"{len(runs)} more do not fit",
                retry_after_s=float(wait_s),
            )
        return [_receipt(run, state) for run, state in zip(runs, answer[1:], strict=True)]

    @override
    async def cancel(self, run_ids: Sequence[str], *, abandon_by: str | None = None) -> list[str]:
        states: list[str] = []
        for ids in _chunks(run_ids):
            states += _texts(await self._run("cancel", abandon_by or "", *ids))
        return states

    @override
    async def wait(self, worker_id: str, *, for_work: bool, wait_s: float) -> Notice:
        """See Queue.wait. One wait per worker at a time; cancelling it is cheap and loses nothing.

        After it raised, claim once before waiting again. A ``wait_s`` of 0 looks and returns.
        """
        if wait_s > 0:
            came = await self._listener(worker_id).wait(for_work=for_work, wait_s=wait_s)
        else:
            came = await self._look(worker_id, for_work=for_work)
        cancelled: tuple[str, ...] = ()
        if "inbox" in came:
            ids = await self._run("inbox", worker_id, came["inbox"])
            cancelled = tuple(_texts(ids))
        return Notice(work="wake" in came, cancelled=cancelled)

    @override
    async def claim(self, worker_id: str, *, max_runs: int, lease_s: float) -> list[Delivery]:
        """See Queue.claim. A run that this worker lost earlier may come back to it: the delivery
        with the higher attempt replaces the other.
        """
        if max_runs <= 0:
            return []
        count = min(max_runs, MAX_BATCH)
        flat = cast("list[bytes]", await self._run("claim", worker_id, count, _us(lease_s)))
        return [
            Delivery(flat[i].decode(), flat[i + 1], int(flat[i + 2]), int(flat[i + 3]) / 1000)
            for i in range(0, len(flat), 4)
        ]

    @override
    async def renew(self, worker_id: str, run_ids: Sequence[str], *, lease_s: float) -> list[str]:
        lost: list[str] = []
        for ids in _chunks(run_ids):
            lost += _texts(await self._run("renew", worker_id, _us(lease_s), *ids))
        return lost

    @override
    async def finish(self, worker_id: str, finished: Sequence[FinishedRun]) -> list[bool]:
        recorded: list[bool] = []
        for runs in _chunks(finished):
            arguments: list[Argument] = [worker_id]
            for run in runs:
                arguments += (run.run_id, run.attempt, run.result)
            recorded += [
                bool(one) for one in cast("list[int]", await self._run("finish", *arguments))
            ]
        return recorded

    @override
    async def release(self, worker_id: str, run_ids: Sequence[str]) -> int:
        released = 0
        for ids in _chunks(run_ids):
            released += cast("int", await self._run("release", worker_id, *ids))
        return released

    @override
    async def announce(self, worker_id: str, *, slots: int, ttl_s: float) -> None:
        await self._run("announce", worker_id, slots, max(1, round(ttl_s * 1000)))

    @override
    async def retire(self, worker_id: str) -> None:
        # Only when it takes no more tokens: one that it took now is passed on by the script.
        if listener := self._listeners.pop(worker_id, None):
            await listener.stop()
        await self._run("announce", worker_id, 0, 0)

    @override
    async def reap(self) -> int:
        touched = 0
        while True:
            now = cast("int", await self._run("reap", self._max_attempts, REAP_BATCH))
            touched += now
            if now < REAP_BATCH:
                return touched

    @override
    async def replies(self, reply_to: str, *, max_replies: int, wait_s: float) -> list[Reply]:
        """See Queue.replies. One reader per ``reply_to``: a second call waits for the first.

        What a call returned is removed from the server by the next call, or by close().
        """
        key = f"{self._tag}replies:{reply_to}"
        wait_s = min(wait_s, MAX_BLOCK_S)
        # In the server's words 0 is for ever; and it ends a short wait up to 100 ms late.
        block = ("BLOCK", math.ceil(wait_s * 1000)) if wait_s > 0 else ()
        async with self._readers.setdefault(reply_to, asyncio.Lock()):
            commands: list[Sequence[Argument]] = []
            if handed_out := self._handed_out.get(reply_to):
                commands.append(("XDEL", key, *handed_out))
            commands.append(("XREAD", "COUNT", max_replies, *block, "STREAMS", key, "0"))
            entries = _entries((await self._server.block(commands, wait_s=max(0, wait_s)))[-1])
            self._handed_out[reply_to] = [entry_id for entry_id, _ in entries]
            return [Reply(fields[1].decode(), fields[3]) for _, fields in entries]

    @override
    async def stats(self) -> QueueStats:
        counts = [int(one) for one in cast("list[bytes]", await self._run("stats"))]
        queued, leased, queued_bytes, oldest_us, workers, slots, finished, redelivered = counts
        return QueueStats(
            queued=queued,
            leased=leased,
            queued_bytes=queued_bytes,
            oldest_queued_ms=oldest_us / 1000,
            workers=workers,
            slots=slots,
            finished_total=finished,
            redelivered_total=redelivered,
        )

    @override
    async def ping(self) -> None:
        await self._server.command("PING")

    @override
    async def close(self) -> None:
        """Remove the replies that were handed out, and close all connections."""
        try:
            for listener in self._listeners.values():
                await listener.stop()
            for reply_to, handed_out in self._handed_out.items():
                if handed_out:
                    key = f"{self._tag}replies:{reply_to}"
                    await self._server.command("XDEL", key, *handed_out)
            self._handed_out.clear()
        finally:
            await self._server.close()

    def _listener(self, worker_id: str) -> Listener:
        listener = self._listeners.get(worker_id)
        if listener is None:
            listener = self._listeners[worker_id] = Listener(
                self._server,
                inbox=f"{self._tag}inbox:{worker_id}",
                wake=self._tag + "wake",
                pass_on=lambda: self._run("wake"),
            )
        return listener

    async def _look(self, worker_id: str, *, for_work: bool) -> dict[Source, bytes]:
        sources: dict[str, Source] = {f"{self._tag}inbox:{worker_id}": "inbox"}
        if for_work:
            sources[self._tag + "wake"] = "wake"
        # Inside a transaction a blocking read does not block.
        commands = [("MULTI",), ("BLPOP", *sources, 0), ("EXEC",)]
        [popped] = cast("list[Answer]", (await self._server.block(commands, wait_s=0))[-1])
        if popped is None:
            return {}
        key, value = cast("tuple[bytes, bytes]", popped)
        return {sources[key.decode()]: value}

    async def _run(self, name: ScriptName, *arguments: Argument) -> Answer:
        head = (self._tag, self._result_ttl_ms)
        return await self._server.run(script(name), self._keys, (*head, *arguments))


def _chunks[T](items: Sequence[T]) -> list[Sequence[T]]:
    return [items[i : i + MAX_BATCH] for i in range(0, len(items), MAX_BATCH)]


def _texts(answer: Answer) -> list[str]:
    return [one.decode() for one in cast("list[bytes]", answer)]


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1_000_000))


def _receipt(run: QueuedRun, state: Answer) -> SubmitReceipt:
    if state == b"accepted":
        return SubmitReceipt(run.run_id, "accepted")
    if state == b"joined":
        return SubmitReceipt(run.run_id, "joined")
    _, result = cast("tuple[bytes, bytes]", state)
    return SubmitReceipt(run.run_id, "done", result)


def _entries(answer: Answer) -> list[tuple[bytes, list[bytes]]]:
    """The entries of the one stream in an answer to XREAD; None when the time was over."""
    if answer is None:
        return []
    [(_, entries)] = cast("list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]", answer)
    return entries
