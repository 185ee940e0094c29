"""The results for one gateway, from all shards: whichever has some is read, and none is waited for.

The reads stay at the servers when a call ends. While a shard is away the others' results go on;
when it is back, its gateway is told by QueueUnavailable, once, because runs may have died with it
and must be asked for again.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from rollyard_queue.base import QueueUnavailable
from rollyard_queue.records import Reply
from rollyard_queue.replies import ReplyStream

RETRY_S = (0.1, 1.0)  # first and longest pause between two tries; each doubles


class Mailbox:
    """One reader at a time: a second read waits for the first."""

    def __init__(self, streams: Sequence[ReplyStream]) -> None:
        self._streams = streams
        self._reading = asyncio.Lock()
        self._reads: dict[int, asyncio.Task[list[Reply]]] = {}
        self._away: dict[int, asyncio.Task[None]] = {}
        # Read and not yet handed out; a stream is not read on before, for that removes them.
        self._left: dict[int, deque[Reply]] = {}

    async def read(self, *, max_replies: int, wait_s: float) -> list[Reply]:
        """Take up to ``max_replies``, waiting up to ``wait_s`` seconds for the first.

        Raises:
            QueueUnavailable: no shard answers, or one that did not does again.
        """
        async with self._reading:
            if len(self._streams) == 1:
                return await self._streams[0].read(max_replies=max_replies, wait_s=wait_s)
            loop = asyncio.get_running_loop()
            end = loop.time() + wait_s
            while True:
                if taken := self._take(max_replies):
                    return taken
                left_s = max(0.0, end - loop.time())
                started = self._start(max_replies, left_s)
                if wait_s > 0:
                    tasks = (*self._reads.values(), *self._away.values())
                    await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                elif started:  # each is at its end after one round trip
                    await asyncio.wait(started)
                self._collect()
                if not self._left and loop.time() >= end:
                    return []

    async def acknowledge(self) -> None:
        """Remove what was handed out, and read no more.

        Raises:
            QueueUnavailable: some of it may still be there, and expires.
        """
        tasks = (*self._reads.values(), *self._away.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for stream in self._streams:
            await stream.acknowledge()

    def _start(self, max_replies: int, wait_s: float) -> list[asyncio.Task[list[Reply]]]:
        started: list[asyncio.Task[list[Reply]]] = []
        for number, stream in enumerate(self._streams):
            if number not in self._reads and number not in self._away:
                read = asyncio.create_task(stream.read(max_replies=max_replies, wait_s=wait_s))
                self._reads[number] = read
                started.append(read)
        return started

    def _take(self, max_replies: int) -> list[Reply]:
        taken: list[Reply] = []
        for number, replies in list(self._left.items()):
            while replies and len(taken) < max_replies:
                taken.append(replies.popleft())
            if not replies:
                del self._left[number]
        return taken

    def _collect(self) -> None:
        self._look_who_is_back()
        failed: QueueUnavailable | None = None
        for number, read in list(self._reads.items()):
            if not read.done():
                continue
            del self._reads[number]
            try:
                replies = read.result()
            except QueueUnavailable as error:
                failed = error
                self._away[number] = asyncio.create_task(self._until_back(self._streams[number]))
            else:
                if replies:
                    self._left[number] = deque(replies)
        if failed and len(self._away) == len(self._streams):
            for task in self._away.values():
                task.cancel()
            self._away.clear()
            raise failed

    def _look_who_is_back(self) -> None:
        back = [number for number, task in self._away.items() if task.done()]
        for number in back:
            del self._away[number]
        if back:
            raise QueueUnavailable(
                f"shard {', '.join(map(str, back))} of the queue was away, and is back"
            )

    async def _until_back(self, stream: ReplyStream) -> None:
        pause_s, longest_s = RETRY_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await stream.look()
            except QueueUnavailable:
                pause_s = min(2 * pause_s, longest_s)
            else:
                return
