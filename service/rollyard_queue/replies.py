"""The reply stream of one gateway, on one shard: read without removing, removed at the next read.

A result that was read and lost with a connection or a process is still there. A worker sends what
it finished together as one entry, so an entry may have more results than its reader asked for; the
rest waits here.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import cast

from rollyard_queue.connections import Answer, Argument, Node
from rollyard_queue.records import Reply

MAX_BLOCK_S = 60.0  # longer waits are cut, so that a dead connection is noticed
MAX_ENTRIES = 32  # in one answer: a few thousand small results

type Entry = tuple[bytes, tuple[bytes, bytes]]


class ReplyStream:
    """One reader at a time: a second read waits for the first."""

    def __init__(self, node: Node, key: str) -> None:
        self._node = node
        self._key = key
        self._reading = asyncio.Lock()
        # A reply, and the entry that has been handed out whole with it.
        self._read: deque[tuple[Reply, bytes | None]] = deque()
        self._handed_out: list[bytes] = []

    async def read(self, *, max_replies: int, wait_s: float) -> list[Reply]:
        """Take up to ``max_replies``, waiting up to ``wait_s`` seconds for the first.

        Raises:
            QueueUnavailable: nothing was taken.
        """
        async with self._reading:
            if not self._read:
                await self._fetch(min(max_replies, MAX_ENTRIES), wait_s)
            return self._take(max_replies)

    async def look(self) -> None:
        """Return if the stream can be read; a PING is answered by a server that lacks it, too.

        Raises:
            QueueUnavailable: its server is away, or a cluster moves its slot.
        """
        await self._node.command("EXISTS", self._key)

    async def acknowledge(self) -> None:
        """Remove what was handed out.

        Raises:
            QueueUnavailable: it may still be there, and expires.
        """
        if self._handed_out:
            await self._node.command("XDEL", self._key, *self._handed_out)
            self._handed_out.clear()

    async def _fetch(self, count: int, wait_s: float) -> None:
        wait_s = min(wait_s, MAX_BLOCK_S)
        # In the server's words 0 is for ever; and it ends a short wait up to 100 ms late.
        block = ("BLOCK", math.ceil(wait_s * 1000)) if wait_s > 0 else ()
        commands: list[Sequence[Argument]] = []
        if self._handed_out:
            commands.append(("XDEL", self._key, *self._handed_out))
        commands.append(("XREAD", "COUNT", count, *block, "STREAMS", self._key, "0"))
        answers = await self._node.block(commands, wait_s=max(0.0, wait_s))
        self._handed_out.clear()
        for entry_id, (index, results) in _entries(answers[-1]):
            ids = index.decode().split(" ")
            start = 0
            for i in range(0, len(ids), 2):
                end = start + int(ids[i + 1])
                reply = Reply(ids[i], results[start:end])
                self._read.append((reply, entry_id if i == len(ids) - 2 else None))
                start = end

    def _take(self, max_replies: int) -> list[Reply]:
        taken: list[Reply] = []
        while self._read and len(taken) < max_replies:
            reply, whole = self._read.popleft()
            taken.append(reply)
            if whole is not None:
                self._handed_out.append(whole)
        return taken


def _entries(answer: Answer) -> list[Entry]:
    """The entries of the one stream in an answer to XREAD; None when the time was over."""
    if answer is None:
        return []
    [(_, entries)] = cast("list[tuple[bytes, list[Entry]]]", answer)
    return entries
