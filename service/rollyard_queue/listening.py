"""What one worker listens to: its inbox on each shard, and the wake tokens while it wants work.

The reads stay at the servers when a wait ends or is cancelled, and the next wait goes on with
them: a worker that is interrupted for every finished run pays no new connection, and nothing that
arrives in between is lost. A shard that is away is tried again quietly while others can be heard.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, cast

from rollyard_queue.base import QueueUnavailable
from rollyard_queue.connections import Answer, Node

STEP_S = 60.0  # a read is renewed after it, so that a dead connection is noticed
RETRY_S = 1.0  # between two tries to reach a shard that is away

type Kind = Literal["inbox", "wake"]
type Source = tuple[int, Kind]
"""The number of a shard, and what came from there."""


class Ear(NamedTuple):
    """What one shard has for one worker."""

    node: Node
    inbox: str
    wake: str
    pass_on: Callable[[], Awaitable[object]]
    """Gives a wake token to another worker, where this one has no use for it."""


class Listener:
    """The outstanding reads of one worker; one wait at a time, and none after stop()."""

    def __init__(self, ears: Sequence[Ear]) -> None:
        self._ears = ears
        self._reads: dict[Source, asyncio.Task[Answer]] = {}
        self._away: set[int] = set()
        self._wants_work = False
        self._passing_on: set[asyncio.Task[None]] = set()

    async def wait(self, *, for_work: bool, wait_s: float) -> dict[Source, bytes]:
        """Wait for any; return what came from where, or nothing when the time is over.

        Raises:
            QueueUnavailable: no shard can be heard; the next call tries again.
        """
        kinds: tuple[Kind, ...] = ("inbox", "wake") if for_work else ("inbox",)
        sources: list[Source] = [
            (shard, kind) for shard in range(len(self._ears)) for kind in kinds
        ]
        end = asyncio.get_running_loop().time() + wait_s
        self._wants_work = for_work
        try:
            if not for_work:
                self._give_up_tokens()
            while True:
                reads = [self._read(source) for source in sources]
                left_s = end - asyncio.get_running_loop().time()
                await asyncio.wait(reads, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                came = self._take(sources)
                if came or asyncio.get_running_loop().time() >= end:
                    return came
        finally:
            self._wants_work = False

    async def stop(self) -> None:
        """Drop the outstanding reads and their connections."""
        reads = list(self._reads.values())
        self._reads.clear()
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, *self._passing_on, return_exceptions=True)

    def _read(self, source: Source) -> asyncio.Task[Answer]:
        if source not in self._reads:
            read = asyncio.create_task(self._pop(source))
            self._reads[source] = read
            if source[1] == "wake":
                read.add_done_callback(self._woken)
        return self._reads[source]

    async def _pop(self, source: Source) -> Answer:
        shard, kind = source
        ear = self._ears[shard]
        if shard in self._away:
            await asyncio.sleep(RETRY_S)
        key = ear.inbox if kind == "inbox" else ear.wake
        return (await ear.node.block([("BLPOP", key, STEP_S)], wait_s=STEP_S))[-1]

    def _take(self, sources: list[Source]) -> dict[Source, bytes]:
        came: dict[Source, bytes] = {}
        failed: QueueUnavailable | None = None
        for source in sources:
            if not self._reads[source].done():
                continue
            try:
                popped = cast("tuple[bytes, bytes] | None", self._reads.pop(source).result())
            except QueueUnavailable as error:
                failed = error
                self._away.add(source[0])
                continue
            self._away.discard(source[0])
            if popped is not None:
                came[source] = popped[1]
        if failed and not came and len(self._away) == len(self._ears):
            self._away.clear()  # the caller has been told, and comes back when it thinks fit
            raise failed
        return came

    def _woken(self, read: asyncio.Task[Answer]) -> None:
        if not self._wants_work and read in self._reads.values():
            self._give_up_tokens()

    def _give_up_tokens(self) -> None:
        """Pass tokens on that came while nobody here waited for work."""
        for shard, ear in enumerate(self._ears):
            read = self._reads.get((shard, "wake"))
            if read is None or not read.done():
                continue
            del self._reads[shard, "wake"]
            if not read.cancelled() and read.exception() is None and read.result() is not None:
                task = asyncio.create_task(self._pass_on_quietly(ear))
                self._passing_on.add(task)
                task.add_done_callback(self._passing_on.discard)

    async def _pass_on_quietly(self, ear: Ear) -> None:
        # If it fails, reap() finds the work without a token and repairs that.
        await asyncio.gather(ear.pass_on(), return_exceptions=True)
