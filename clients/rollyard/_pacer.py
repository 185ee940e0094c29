"""Much work in one event loop without keeping the others in it waiting.

Ten thousand calls that start at once are tenths of a second of encoding, and so are their answers
that come at once. The loop is the caller's: a trainer's heartbeats and other requests live in it.
So such work is written as generators that pause after every few runs, and all of them together
get a slice of each turn of the loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Generator

# Of each turn. What the slice causes (tasks that wake, sockets that are ready) comes on top, and is
# a few times as much: 4 ms keep a turn of 10,000 calls below 20 ms.
SLICE_S = 0.004
# Runs between two looks at the clock: a fraction of a millisecond.
STRIDE = 16

Work = Generator[None, None, object]

logger = logging.getLogger(__name__)


class Pacer:
    """Runs generators a slice at a time, in turns. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Work, asyncio.Future[None] | None]] = deque()
        self._next: asyncio.Handle | None = None

    def start(self, work: Work) -> None:
        """Run ``work`` in the background; what it raises is logged."""
        self._put(work, None)

    async def finish(self, work: Work) -> None:
        """Run ``work`` to its end; raises what it raises. Cancelled, it goes no further."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._put(work, done)
        await done

    def stop(self) -> None:
        """Drop all work."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        while self._queue:
            work, done = self._queue.popleft()
            work.close()
            if done is not None:
                done.cancel()

    def _put(self, work: Work, done: "asyncio.Future[None] | None") -> None:
        self._queue.append((work, done))
        if self._next is None:
            self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        # Set while it runs: work that starts work must not ask for a second turn.
        queue, give_up = self._queue, time.perf_counter() + SLICE_S
        while queue:
            work, done = queue.popleft()
            if done is not None and done.done():  # cancelled
                work.close()
            elif self._step(work, done):
                queue.append((work, done))
            if time.perf_counter() >= give_up:
                break
        self._next = self._loop.call_soon(self._turn) if queue else None

    def _step(self, work: Work, done: "asyncio.Future[None] | None") -> bool:
        try:
            next(work)
        except StopIteration:
            if done is not None:
                done.set_result(None)
            return False
        except Exception as error:
            if done is None:
                logger.exception("work of the client failed")
            else:
                done.set_exception(error)
            return False
        return True
