"""What one worker listens to: its inbox, and the wake tokens while it wants work.

Both reads stay at the server when a wait ends or is cancelled, and the next wait goes on with
them: a worker that is interrupted for every finished run pays no new connection, and nothing that
arrives in between is lost.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, cast

from rollyard_queue.connections import Answer, Node

STEP_S = 60.0  # a read is renewed after it, so that a dead connection is noticed

type Source = Literal["inbox", "wake"]


class Listener:
    """The outstanding reads of one worker; one wait at a time, and none after stop()."""

    def __init__(
        self, node: Node, *, inbox: str, wake: str, pass_on: Callable[[], Awaitable[object]]
    ) -> None:
        """``pass_on`` gives a wake token to another worker, where this one has no use for it."""
        self._node = node
        self._keys: dict[Source, str] = {"inbox": inbox, "wake": wake}
        self._pass_on = pass_on
        self._reads: dict[Source, asyncio.Task[Answer]] = {}
        self._wants_work = False
        self._passing_on: set[asyncio.Task[None]] = set()

    async def wait(self, *, for_work: bool, wait_s: float) -> dict[Source, bytes]:
        """Wait for either; return what came from where, or nothing when the time is over.

        Raises:
            QueueUnavailable: the connection broke; the next call makes a new one.
        """
        sources: list[Source] = ["inbox", "wake"] if for_work else ["inbox"]
        end = asyncio.get_running_loop().time() + wait_s
        self._wants_work = for_work
        try:
            if not for_work:
                self._give_up_token()
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
            read = asyncio.create_task(self._pop(self._keys[source]))
            self._reads[source] = read
            if source == "wake":
                read.add_done_callback(self._woken)
        return self._reads[source]

    async def _pop(self, key: str) -> Answer:
        return (await self._node.block([("BLPOP", key, STEP_S)], wait_s=STEP_S))[-1]

    def _take(self, sources: list[Source]) -> dict[Source, bytes]:
        came: dict[Source, bytes] = {}
        for source in sources:
            if self._reads[source].done():
                popped = cast("tuple[bytes, bytes] | None", self._reads.pop(source).result())
                if popped is not None:
                    came[source] = popped[1]
        return came

    def _woken(self, read: asyncio.Task[Answer]) -> None:
        if not self._wants_work and self._reads.get("wake") is read:
            self._give_up_token()

    def _give_up_token(self) -> None:
        """Pass a token on that came while nobody here waited for work."""
        read = self._reads.get("wake")
        if read is None or not read.done():
            return
        del self._reads["wake"]
        if not read.cancelled() and read.exception() is None and read.result() is not None:
            task = asyncio.create_task(self._pass_on_quietly())
            self._passing_on.add(task)
            task.add_done_callback(self._passing_on.discard)

    async def _pass_on_quietly(self) -> None:
        # If it fails, reap() finds the work without a token and repairs that.
        await asyncio.gather(self._pass_on(), return_exceptions=True)
