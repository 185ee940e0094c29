"""The queue on Redis ≥7 or Valkey ≥8: shards of it, on one server or on several.

A run's shard follows from its id, so that whoever sends the id again finds the run. A batch goes to
its shards in parallel, one round trip each.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Self, override
from zlib import crc32

from rollyard_queue.base import Queue, QueueFull, QueueUnavailable, RunIdTaken
from rollyard_queue.bounds import Bounds
from rollyard_queue.failures import SlotMoving
from rollyard_queue.listening import Listener, Source
from rollyard_queue.mailbox import Mailbox
from rollyard_queue.places import Places
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

MAX_SHARDS = 64


class RedisQueue(Queue):
    """A queue that any number of gateways and workers share.

    With several shards the bounds are divided evenly between them, and rounded up.
    """

    def __init__(self, url: str, *, name: str, shards: int, bounds: Bounds) -> None:
        """See from_url."""
        if not name or set(name) & set("{}:"):
            raise ValueError(f"queue name {name!r} must not be empty nor have braces or colons")
        if not 1 <= shards <= MAX_SHARDS:
            raise ValueError(f"a queue has 1 to {MAX_SHARDS} shards, not {shards}")
        tags = [f"{name}:{number}" for number in range(shards)]
        self._places = Places.from_url(url, tags=tags)
        part = bounds.of_one_shard(shards)
        self._shards = [
            Shard(node, tag=f"{{{tag}}}:", bounds=part)
            for node, tag in zip(self._places.nodes, tags, strict=True)
        ]
        self._mailboxes: dict[str, Mailbox] = {}
        self._listeners: dict[str, Listener] = {}
        # By worker: shards that said that they have work, and where its next round begins.
        self._told: dict[str, set[int]] = {}
        self._turn = 0

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        name: str = "rollyard",
        shards: int = 1,
        max_queued: int = 100_000,
        max_queued_bytes: int = 1 << 30,
        max_queued_per_job: int = 0,
        max_queued_bytes_per_job: int = 0,
        max_running_per_job: int = 0,
        max_attempts: int = 3,
        result_ttl_s: float = 60,
    ) -> Self:
        """Make a queue on one server, several, a cluster or behind sentinels.

        ``url`` is as :mod:`rollyard_queue.places` says; ``name`` separates queues on one server;
        ``shards`` is the number of parts; the rest is explained in :class:`Bounds`. All processes
        of one queue must agree on everything. Nothing is connected before the first call.

        Raises:
            ValueError: the URL, the name or the number of shards is malformed.
        """
        bounds = Bounds(
            max_queued=max_queued,
            max_queued_bytes=max_queued_bytes,
            max_queued_per_job=max_queued_per_job,
            max_queued_bytes_per_job=max_queued_bytes_per_job,
            max_running_per_job=max_running_per_job,
            max_attempts=max_attempts,
            result_ttl_s=result_ttl_s,
        )
        return cls(url, name=name, shards=shards, bounds=bounds)

    @override
    async def submit(self, runs: Sequence[QueuedRun], *, reply_to: str) -> list[SubmitReceipt]:
        """See Queue.submit. Results may reach ``replies`` before this returns.

        Raises:
            QueueFull, RunIdTaken: nothing of the batch stays queued.
            ValueError: more than 1,024 runs, or ``reply_to`` is not one line.
        """
        if not runs:
            return []
        if len(runs) > MAX_BATCH:
            raise ValueError(f"a batch has at most {MAX_BATCH} runs, not {len(runs)}")
        if not reply_to or "\n" in reply_to:
            raise ValueError("reply_to must be one line and not empty")
        if len(self._shards) == 1:
            return await self._shards[0].submit(runs, reply_to=reply_to)
        parts = self._parts([run.run_id for run in runs])
        answers = await asyncio.gather(
            *(
                self._shards[shard].submit([runs[i] for i in part], reply_to=reply_to)
                for shard, part in parts.items()
            ),
            return_exceptions=True,
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            receipts = [one for answer in answers if isinstance(answer, list) for one in answer]
            await self._refuse(failures, receipts, reply_to)
        return _in_order(parts, answers, len(runs))

    async def _refuse(
        self, failures: list[BaseException], receipts: list[SubmitReceipt], reply_to: str
    ) -> None:
        """All or nothing: where a shard refuses, the others give back what they took."""
        full = [failure for failure in failures if isinstance(failure, QueueFull)]
        taken = [failure for failure in failures if isinstance(failure, RunIdTaken)]
        if len(full) + len(taken) < len(failures):
            refusals = (QueueFull, RunIdTaken)
            raise next(failure for failure in failures if not isinstance(failure, refusals))
        accepted = [receipt.run_id for receipt in receipts if receipt.state == "accepted"]
        await self.cancel(accepted, abandon_by=reply_to)
        if taken:
            raise RunIdTaken([run_id for failure in taken for run_id in failure.run_ids])
        raise max(full, key=lambda failure: failure.retry_after_s)

    @override
    async def cancel(self, run_ids: Sequence[str], *, abandon_by: str | None = None) -> list[str]:
        return await self._each(
            run_ids,
            list(run_ids),
            lambda shard, ids: shard.cancel(ids, abandon_by=abandon_by),
        )

    @override
    async def wait(self, worker_id: str, *, for_work: bool, wait_s: float) -> Notice:
        """See Queue.wait. One wait per worker at a time; cancelling it is cheap and loses nothing.

        After it raised, claim once before waiting again. A ``wait_s`` of 0 looks and returns.
        """
        if wait_s > 0:
            listener = self._listeners.get(worker_id)
            if listener is None:
                ears = [shard.ear(worker_id) for shard in self._shards]
                listener = self._listeners[worker_id] = Listener(ears)
            came = await listener.wait(for_work=for_work, wait_s=wait_s)
        else:
            came = await self._look(worker_id, for_work=for_work)
        told = {shard for shard, kind in came if kind == "wake"}
        if told:
            self._told.setdefault(worker_id, set()).update(told)
        inboxes = {shard: first for (shard, kind), first in came.items() if kind == "inbox"}
        stops = await asyncio.gather(
            *(self._shards[shard].notices(worker_id, one) for shard, one in inboxes.items()),
            return_exceptions=True,  # what is lost here is named by the next renew()
        )
        cancelled = [run_id for ids in stops if isinstance(ids, list) for run_id in ids]
        return Notice(work=bool(told), cancelled=tuple(cancelled))

    async def _look(self, worker_id: str, *, for_work: bool) -> dict[Source, bytes]:
        looks = await asyncio.gather(
            *(shard.look(worker_id, for_work=for_work) for shard in self._shards)
        )
        return {
            (shard, kind): first for shard, look in enumerate(looks) for kind, first in look.items()
        }

    @override
    async def claim(self, worker_id: str, *, max_runs: int, lease_s: float) -> list[Delivery]:
        """See Queue.claim. A run that this worker lost earlier may come back to it: the delivery
        with the higher attempt replaces the other.

        Shards that said that they have work are asked first; the first of them changes each time.
        Only a call that has claimed nothing waits for a shard that a cluster moves.
        """
        if len(self._shards) == 1:
            return await self._shards[0].claim(worker_id, max_runs=max_runs, lease_s=lease_s)
        claimed: list[Delivery] = []
        moving: list[int] = []
        answered = False
        total = len(self._shards)
        self._turn = (self._turn + 1) % total
        others = [(self._turn + i) % total for i in range(total)]
        told = self._told.pop(worker_id, set())
        asked = [shard for shard in others if shard in told] or others[:1]
        others = [shard for shard in others if shard not in asked]
        while asked and len(claimed) < max_runs:
            wants = _shares(max_runs - len(claimed), len(asked))
            answers = await self._claim(worker_id, asked, wants, lease_s=lease_s)
            failed = [answer for answer in answers if isinstance(answer, BaseException)]
            claimed += [one for answer in answers if isinstance(answer, list) for one in answer]
            answered = answered or len(failed) < len(answers)
            moving += [
                shard
                for shard, answer in zip(asked, answers, strict=False)
                if isinstance(answer, SlotMoving)
            ]
            if failed and not (claimed or others or moving):
                raise failed[0]
            # Whoever gave all that it was asked for may have more.
            more = [
                shard
                for shard, want, answer in zip(asked, wants, answers, strict=False)
                if isinstance(answer, list) and len(answer) == want
            ]
            asked, others = more + asked[len(wants) :] + others, []
        if moving:
            self._told.setdefault(worker_id, set()).update(told.intersection(moving))
        if claimed or not moving:
            return claimed
        try:
            shard = self._shards[moving[0]]
            return await shard.claim(worker_id, max_runs=max_runs, lease_s=lease_s)
        except SlotMoving:
            if not answered:
                raise
            return []

    async def _claim(
        self, worker_id: str, shards: Sequence[int], wants: Sequence[int], *, lease_s: float
    ) -> list[list[Delivery] | BaseException]:
        """From the first shards, as many as there are numbers, at once; none waits for a move."""
        calls = [
            self._shards[shard].claim(worker_id, max_runs=want, lease_s=lease_s, patient=False)
            for shard, want in zip(shards, wants, strict=False)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    @override
    async def renew(self, worker_id: str, run_ids: Sequence[str], *, lease_s: float) -> list[str]:
        """See Queue.renew. Of several shards each has a third of ``lease_s`` to answer."""
        parts = self._parts(run_ids)
        # Leases are renewed each third of their time: waiting longer for one shard would let those
        # on the others end. Who lets them end on purpose waits for all.
        within_s = lease_s / 3 if len(parts) > 1 and lease_s > 0 else None
        lost = await _all(
            self._renew(shard, worker_id, [run_ids[i] for i in part], lease_s, within_s)
            for shard, part in parts.items()
        )
        gone = {run_id for ids in lost for run_id in ids}
        return [run_id for run_id in run_ids if run_id in gone]

    async def _renew(
        self,
        shard: int,
        worker_id: str,
        run_ids: Sequence[str],
        lease_s: float,
        within_s: float | None,
    ) -> list[str]:
        try:
            async with asyncio.timeout(within_s):
                return await self._shards[shard].renew(worker_id, run_ids, lease_s=lease_s)
        except TimeoutError:
            raise QueueUnavailable(
                f"shard {shard} of the queue did not renew leases within {within_s:.2f} s"
            ) from None

    @override
    async def finish(self, worker_id: str, finished: Sequence[FinishedRun]) -> list[bool]:
        return await self._each(
            [run.run_id for run in finished],
            list(finished),
            lambda shard, runs: shard.finish(worker_id, runs),
        )

    @override
    async def release(self, worker_id: str, run_ids: Sequence[str]) -> int:
        return sum(
            await _all(
                self._shards[shard].release(worker_id, [run_ids[i] for i in part])
                for shard, part in self._parts(run_ids).items()
            )
        )

    @override
    async def announce(self, worker_id: str, *, slots: int, ttl_s: float) -> None:
        await _all(shard.announce(worker_id, slots=slots, ttl_s=ttl_s) for shard in self._shards)

    @override
    async def retire(self, worker_id: str) -> None:
        # Only when it takes no more tokens: one that it took now is passed on by the script.
        if listener := self._listeners.pop(worker_id, None):
            await listener.stop()
        self._told.pop(worker_id, None)
        await _all(shard.retire(worker_id) for shard in self._shards)

    @override
    async def reap(self) -> int:
        return sum(await _all(shard.reap() for shard in self._shards))

    @override
    async def replies(self, reply_to: str, *, max_replies: int, wait_s: float) -> list[Reply]:
        """See Queue.replies. One reader per ``reply_to``: a second call waits for the first.

        What a call returned is removed from the server by a later call, or by close(). With several
        shards it also raises, once, when a shard that was away is back: ask again for what it had.
        """
        mailbox = self._mailboxes.get(reply_to)
        if mailbox is None:
            streams = [shard.reply_stream(reply_to) for shard in self._shards]
            mailbox = self._mailboxes[reply_to] = Mailbox(streams)
        return await mailbox.read(max_replies=max_replies, wait_s=wait_s)

    @override
    async def stats(self) -> QueueStats:
        parts = await _all(shard.stats() for shard in self._shards)
        return QueueStats(
            queued=sum(part.queued for part in parts),
            leased=sum(part.leased for part in parts),
            queued_bytes=sum(part.queued_bytes for part in parts),
            oldest_queued_ms=max(part.oldest_queued_ms for part in parts),
            # Each worker is announced to every shard.
            workers=max(part.workers for part in parts),
            slots=max(part.slots for part in parts),
            finished_total=sum(part.finished_total for part in parts),
            redelivered_total=sum(part.redelivered_total for part in parts),
        )

    @override
    async def ping(self) -> None:
        answers = await asyncio.gather(
            *(shard.ping() for shard in self._shards), return_exceptions=True
        )
        if all(isinstance(answer, BaseException) for answer in answers):
            await _all(shard.ping() for shard in self._shards)

    @override
    async def ready(self) -> None:
        await _all(shard.ready() for shard in self._shards)

    @override
    async def close(self) -> None:
        """Remove the replies that were handed out, and close all connections."""
        try:
            for listener in self._listeners.values():
                await listener.stop()
            await _all(mailbox.acknowledge() for mailbox in self._mailboxes.values())
        finally:
            await self._places.close()

    @property
    @override
    def parts(self) -> int:
        return len(self._shards)

    @override
    def part_of(self, run_id: str) -> int:
        return crc32(run_id.encode()) % len(self._shards) if len(self._shards) > 1 else 0

    def _parts(self, run_ids: Sequence[str]) -> dict[int, list[int]]:
        """Shard to the indexes of its runs."""
        if len(self._shards) == 1:
            return {0: list(range(len(run_ids)))} if run_ids else {}
        parts: dict[int, list[int]] = {}
        for index, run_id in enumerate(run_ids):
            parts.setdefault(self.part_of(run_id), []).append(index)
        return parts

    async def _each[T, A](
        self,
        run_ids: Sequence[str],
        items: list[T],
        call: Callable[[Shard, list[T]], Awaitable[list[A]]],
    ) -> list[A]:
        """One call for each shard with its items; the answers in the order of the items."""
        if len(self._shards) == 1:
            return await call(self._shards[0], items)
        parts = self._parts(run_ids)
        answers = await _all(
            call(self._shards[shard], [items[i] for i in part]) for shard, part in parts.items()
        )
        return _in_order(parts, answers, len(items))


async def _all[A](calls: Iterable[Awaitable[A]]) -> list[A]:
    """Let every call end, also where one fails; then raise the first failure."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    # A refusal says more than an outage does.
    for failure in sorted(failures, key=lambda one: isinstance(one, QueueUnavailable)):
        raise failure
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def _in_order[A](
    parts: dict[int, list[int]], answers: Sequence[list[A] | BaseException], count: int
) -> list[A]:
    placed: dict[int, A] = {}
    for part, answer in zip(parts.values(), answers, strict=True):
        if isinstance(answer, list):
            placed.update(zip(part, answer, strict=True))
    return [placed[i] for i in range(count)]


def _shares(total: int, parts: int) -> list[int]:
    """``total`` in at most ``parts`` parts that are about equal, and none of them 0."""
    parts = min(total, parts)
    return [total // parts + (i < total % parts) for i in range(parts)]
