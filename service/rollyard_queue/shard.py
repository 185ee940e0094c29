"""One shard of the queue on one server: one Lua script, one round trip, for each batch.

Layer: between the queue (``redis``) and the server (``connections``, ``lua/``). Promises beyond
the contract:

- ``finish``, ``renew``, ``release``, ``cancel``, ``reap`` and ``submit`` may be repeated after
  QueueUnavailable; a claim whose answer was lost is redelivered when its lease ends.
- ``replies`` reads without removing, and removes what it handed out when it is called again: a
  connection that breaks loses no result.
- A lost notice of ``wait`` costs time only: ``renew`` names what is no longer held, and ``reap``
  repairs lost wake-ups.
"""

from collections.abc import Sequence
from typing import cast

from rollyard_queue.base import QueueFull
from rollyard_queue.bounds import Bounds
from rollyard_queue.connections import Answer, Argument, Node
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
from rollyard_queue.replies import ReplyStream
from rollyard_queue.scripts import ScriptName, script

MAX_BATCH = 1024  # runs in one script: about 10 ms in which the server does nothing else
REAP_BATCH = 256

KEYS = (
    "load",
    "ring",
    "leases",
    "deadlines",
    "wake",
    "totals",
    "workers",
    "slots",
    "runs",
    "payloads",
    "owners",
    "history",
    "running",
    "bytes",
    "probation",
    "trials",
)

PLACE_CHARS = 18  # since and suffix, before the id (lua/prelude.lua)
SINCE_CHARS = 16


class Shard:
    """All methods are those of :class:`rollyard_queue.base.Queue`, for the runs of this shard."""

    def __init__(self, node: Node, *, tag: str, bounds: Bounds) -> None:
        self.node = node
        self._tag = tag
        self._bounds = bounds
        self._keys = [tag + key for key in KEYS]
        self._head: tuple[Argument, ...] = (
            tag,
            max(1, round(bounds.result_ttl_s * 1000)),
            bounds.max_attempts,
        )
        self._admission: tuple[Argument, ...] = (
            bounds.max_queued,
            bounds.max_queued_bytes,
            bounds.max_queued_per_job,
            bounds.max_queued_bytes_per_job,
        )
        self._replies: dict[str, ReplyStream] = {}
        self._listeners: dict[str, Listener] = {}

    async def submit(self, runs: Sequence[QueuedRun], *, reply_to: str) -> list[SubmitReceipt]:
        classes: dict[tuple[str, int | None, int], int] = {}
        each: list[Argument] = []
        for run in runs:
            kind = (run.job, run.expires_in_ms, run.priority)
            number = classes.setdefault(kind, len(classes) + 1)
            each += (run.run_id, run.payload, number)
        head: list[Argument] = [reply_to, *self._admission, len(classes)]
        for job, expires_in_ms, priority in classes:
            head += (job, "" if expires_in_ms is None else expires_in_ms, priority)
        answer = cast("list[bytes]", await self._run("submit", *head, *each))
        if answer[0] == b"full":
            raise self._full(len(runs), answer)
        return _receipts(runs, answer)

    async def cancel(self, run_ids: Sequence[str], *, abandon_by: str | None = None) -> list[str]:
        states: list[str] = []
        for ids in _chunks(run_ids):
            states += _texts(await self._run("cancel", abandon_by or "", *ids))
        return states

    async def wait(self, worker_id: str, *, for_work: bool, wait_s: float) -> Notice:
        if wait_s > 0:
            came = await self._listener(worker_id).wait(for_work=for_work, wait_s=wait_s)
        else:
            came = await self._look(worker_id, for_work=for_work)
        cancelled: tuple[str, ...] = ()
        if "inbox" in came:
            ids = await self._run("inbox", worker_id, came["inbox"])
            cancelled = tuple(_texts(ids))
        return Notice(work="wake" in came, cancelled=cancelled)

    async def claim(self, worker_id: str, *, max_runs: int, lease_s: float) -> list[Delivery]:
        if max_runs <= 0:
            return []
        answer = await self._run(
            "claim",
            worker_id,
            min(max_runs, MAX_BATCH),
            _us(lease_s),
            self._bounds.max_running_per_job,
        )
        now, places, payloads, repeated = cast(
            "tuple[bytes, list[bytes], list[bytes], list[int | bytes]]", answer
        )
        now_us = int(now)
        attempts = dict(zip(repeated[::2], map(int, repeated[1::2]), strict=True))
        return [
            Delivery(
                place[PLACE_CHARS:].decode(),
                payload,
                attempts.get(number, 1),
                max(0, now_us - int(place[:SINCE_CHARS])) / 1000,
            )
            for number, (place, payload) in enumerate(zip(places, payloads, strict=True), 1)
        ]

    async def renew(self, worker_id: str, run_ids: Sequence[str], *, lease_s: float) -> list[str]:
        lost: list[str] = []
        for ids in _chunks(run_ids):
            lost += _texts(await self._run("renew", worker_id, _us(lease_s), *ids))
        return lost

    async def finish(self, worker_id: str, finished: Sequence[FinishedRun]) -> list[bool]:
        recorded: list[bool] = []
        for runs in _chunks(finished):
            arguments: list[Argument] = [worker_id]
            for run in runs:
                arguments += (run.run_id, run.attempt, run.result)
            letters = cast("bytes", await self._run("finish", *arguments))
            recorded += [letter == ord("1") for letter in letters]
        return recorded

    async def release(self, worker_id: str, run_ids: Sequence[str]) -> int:
        released = 0
        for ids in _chunks(run_ids):
            released += cast("int", await self._run("release", worker_id, *ids))
        return released

    async def announce(self, worker_id: str, *, slots: int, ttl_s: float) -> None:
        await self._run("announce", worker_id, slots, max(1, round(ttl_s * 1000)))

    async def retire(self, worker_id: str) -> None:
        # Only when it takes no more tokens: one that it took now is passed on by the script.
        if listener := self._listeners.pop(worker_id, None):
            await listener.stop()
        await self._run("announce", worker_id, 0, 0)

    async def reap(self) -> int:
        touched = 0
        while True:
            now = cast("int", await self._run("reap", REAP_BATCH))
            touched += now
            if now < REAP_BATCH:
                return touched

    async def replies(self, reply_to: str, *, max_replies: int, wait_s: float) -> list[Reply]:
        stream = self._replies.get(reply_to)
        if stream is None:
            stream = ReplyStream(self.node, f"{self._tag}replies:{reply_to}")
            self._replies[reply_to] = stream
        return await stream.read(max_replies=max_replies, wait_s=wait_s)

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

    async def close(self) -> None:
        """Remove the replies that were handed out, and forget the readers."""
        for listener in self._listeners.values():
            await listener.stop()
        for stream in self._replies.values():
            await stream.acknowledge()

    def _full(self, more: int, answer: list[bytes]) -> QueueFull:
        job, wait_s, queued, queued_bytes = cast("tuple[bytes, bytes, int, int]", answer[1:])
        bounds = self._bounds
        name, runs, size = "the queue", bounds.max_queued, bounds.max_queued_bytes
        if job:
            name = f"job {job.decode()!r}"
            runs, size = bounds.max_queued_per_job, bounds.max_queued_bytes_per_job
        return QueueFull(
            f"{name} holds {queued} runs ({queued_bytes} bytes of at most {size or 'any'}) "
            f"of at most {runs or 'any'}; {more} more do not fit",
            retry_after_s=float(wait_s),
            job=job.decode(),
        )

    def _listener(self, worker_id: str) -> Listener:
        listener = self._listeners.get(worker_id)
        if listener is None:
            listener = self._listeners[worker_id] = Listener(
                self.node,
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
        [popped] = cast("list[Answer]", (await self.node.block(commands, wait_s=0))[-1])
        if popped is None:
            return {}
        key, value = cast("tuple[bytes, bytes]", popped)
        return {sources[key.decode()]: value}

    async def _run(self, name: ScriptName, *arguments: Argument) -> Answer:
        return await self.node.run(script(name), self._keys, (*self._head, *arguments))


def _chunks[T](items: Sequence[T]) -> list[Sequence[T]]:
    return [items[i : i + MAX_BATCH] for i in range(0, len(items), MAX_BATCH)]


def _texts(answer: Answer) -> list[str]:
    return [one.decode() for one in cast("list[bytes]", answer)]


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1_000_000))


def _receipts(runs: Sequence[QueuedRun], answer: list[bytes]) -> list[SubmitReceipt]:
    states, results = answer[0], iter(answer[1:])
    receipts: list[SubmitReceipt] = []
    for run, state in zip(runs, states, strict=True):
        if state == ord("a"):
            receipts.append(SubmitReceipt(run.run_id, "accepted"))
        elif state == ord("j"):
            receipts.append(SubmitReceipt(run.run_id, "joined"))
        else:
            receipts.append(SubmitReceipt(run.run_id, "done", next(results)))
    return receipts
