"""One shard of the queue on one server: one Lua script, one round trip, for each batch.

Layer: between the queue (``redis``) and the server (``connections``, ``lua/``). Promises beyond
the contract:

- ``finish``, ``renew``, ``release``, ``cancel``, ``reap`` and ``submit`` may be repeated after
  QueueUnavailable; a claim whose answer was lost is redelivered when its lease ends.
- A lost notice of what to stop costs time only: ``renew`` names what is no longer held, and
  ``reap`` repairs lost wake-ups.
"""

from collections.abc import Sequence
from typing import cast

from rollyard_queue.base import QueueFull, RunIdTaken
from rollyard_queue.bounds import Bounds
from rollyard_queue.connections import Answer, Argument, Node
from rollyard_queue.listening import Ear, Kind
from rollyard_queue.records import (
    DIGEST_BYTES,
    Delivery,
    FinishedRun,
    QueuedRun,
    QueueStats,
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
    "absent",
)

PLACE_CHARS = 18  # since and suffix, before the id (lua/prelude.lua)
SINCE_CHARS = 16
NO_DIGEST = bytes(DIGEST_BYTES)


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

    async def submit(self, runs: Sequence[QueuedRun], *, reply_to: str) -> list[SubmitReceipt]:
        classes: dict[tuple[str, int | None, int], int] = {}
        each: list[Argument] = []
        for run in runs:
            kind = (run.job, run.expires_in_ms, run.priority)
            number = classes.setdefault(kind, len(classes) + 1)
            each += (run.run_id, run.payload, number)
        digests = b"".join([run.digest or NO_DIGEST for run in runs])
        head: list[Argument] = [reply_to, *self._admission, digests, len(classes)]
        for job, expires_in_ms, priority in classes:
            head += (job, "" if expires_in_ms is None else expires_in_ms, priority)
        answer = cast("list[bytes]", await self._run("submit", *head, *each))
        if answer[0] == b"full":
            raise self._full(len(runs), answer)
        if answer[0] == b"conflict":
            raise RunIdTaken([runs[number - 1].run_id for number in cast("list[int]", answer[1:])])
        return _receipts(runs, answer)

    async def cancel(self, run_ids: Sequence[str], *, abandon_by: str | None = None) -> list[str]:
        states: list[str] = []
        for ids in _chunks(run_ids):
            states += _texts(await self._run("cancel", abandon_by or "", *ids))
        return states

    def ear(self, worker_id: str) -> Ear:
        """What a worker listens to here."""
        return Ear(self.node, self._inbox(worker_id), self._tag + "wake", lambda: self._run("wake"))

    async def look(self, worker_id: str, *, for_work: bool) -> dict[Kind, bytes]:
        """Take what there is of the above, without waiting."""
        kinds: dict[str, Kind] = {self._inbox(worker_id): "inbox"}
        if for_work:
            kinds[self._tag + "wake"] = "wake"
        # Inside a transaction a blocking read does not block.
        commands = [("MULTI",), ("BLPOP", *kinds, 0), ("EXEC",)]
        [popped] = cast("list[Answer]", (await self.node.block(commands, wait_s=0))[-1])
        if popped is None:
            return {}
        key, value = cast("tuple[bytes, bytes]", popped)
        return {kinds[key.decode()]: value}

    async def notices(self, worker_id: str, first: bytes) -> list[str]:
        """The runs that a worker must stop, after a first one came from its inbox."""
        return _texts(await self._run("inbox", worker_id, first))

    async def claim(
        self, worker_id: str, *, max_runs: int, lease_s: float, patient: bool = True
    ) -> list[Delivery]:
        if max_runs <= 0:
            return []
        answer = await self._run(
            "claim",
            worker_id,
            min(max_runs, MAX_BATCH),
            _us(lease_s),
            self._bounds.max_running_per_job,
            patient=patient,
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
        await self._run("announce", worker_id, 0, 0)

    async def reap(self) -> int:
        touched = 0
        while True:
            now = cast("int", await self._run("reap", REAP_BATCH))
            touched += now
            if now < REAP_BATCH:
                return touched

    def reply_stream(self, reply_to: str) -> ReplyStream:
        """The results for one gateway."""
        return ReplyStream(self.node, f"{self._tag}replies:{reply_to}")

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

    async def ping(self) -> None:
        await self.node.command("PING")

    async def ready(self) -> None:
        await self._run("ready")

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

    def _inbox(self, worker_id: str) -> str:
        return f"{self._tag}inbox:{worker_id}"

    async def _run(self, name: ScriptName, *arguments: Argument, patient: bool = True) -> Answer:
        arguments = (*self._head, *arguments)
        return await self.node.run(script(name), self._keys, arguments, patient=patient)


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
