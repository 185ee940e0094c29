"""Runs on their way into the queue: while some submits are under way, the next one gathers.

Single calls thus share round trips without waiting for anybody: an idle gateway sends at once, a
busy one sends what has come meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from rollyard_queue.base import Queue, QueueFull, QueueUnavailable, RunIdTaken
from rollyard_queue.records import QueuedRun, SubmitReceipt

SUBMIT_S = 4.0
"""A submit that takes longer is answered 503; a healthy queue takes milliseconds."""
UNDER_WAY = 2
"""Submits at once: one that the server works on, one that travels. More would only split them."""
MAX_RUNS = 256
"""Runs of several calls in one submit, unless one call alone has more: some 4 ms of the server."""
MAX_BYTES = 4 * 1024 * 1024
CLOSE_S = 2.0


class Submission:
    """The runs of one call. ``answered`` ends with nothing, or with what submit() raises."""

    def __init__(
        self, runs: Sequence[QueuedRun], size_bytes: int, answered: asyncio.Future[None]
    ) -> None:
        self.runs = runs
        self.size_bytes = size_bytes
        self.answered = answered
        self.sent = False
        self.landed = False
        """Nothing of it is under way any more."""
        self.on_landed: Callable[[], None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Submissions:
    """Gathers and sends. All methods belong to one event loop."""

    def __init__(
        self, queue: Queue, *, reply_to: str, on_result: Callable[[str, bytes], object]
    ) -> None:
        """``on_result`` gets the results of runs that had ended before they were submitted."""
        self._queue = queue
        self._reply_to = reply_to
        self._on_result = on_result
        self._waiting: deque[Submission] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_waking = False

    def add(self, runs: Sequence[QueuedRun], *, size_bytes: int) -> Submission:
        """Have these runs submitted, all or nothing; ``size_bytes`` is that of their payloads.

        ``answered`` raises QueueFull or RunIdTaken, or, after SUBMIT_S at the latest,
        QueueUnavailable; the runs may then still land: ``landed`` says whether, ``on_landed`` is
        called when they have.
        """
        loop = asyncio.get_running_loop()
        one = Submission(runs, size_bytes, loop.create_future())
        one.timer = loop.call_later(SUBMIT_S, self._give_up, one)
        self._waiting.append(one)
        if not self._is_waking and len(self._tasks) < UNDER_WAY:
            self._is_waking = True
            loop.call_soon(self._wake)  # after the other requests that are ready to be read now
        return one

    async def close(self) -> None:
        """Wait for what is under way, as far as the queue answers in time."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    def _wake(self) -> None:
        self._is_waking = False
        while self._waiting and len(self._tasks) < UNDER_WAY:
            group = self._next_group()
            if group:
                task = asyncio.create_task(self._send(group))
                self._tasks.add(task)
                task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake()

    def _next_group(self) -> list[Submission]:
        """What may travel together; those that nobody waits for any more are left out."""
        group: list[Submission] = []
        runs = size = 0
        while self._waiting:
            one = self._waiting[0]
            if one.answered.done():
                self._waiting.popleft()
                _land(one)
                continue
            runs += len(one.runs)
            size += one.size_bytes
            if group and (runs > MAX_RUNS or size > MAX_BYTES):
                break
            one.sent = True
            group.append(self._waiting.popleft())
        return group

    async def _send(self, group: list[Submission]) -> None:
        runs = group[0].runs if len(group) == 1 else [run for one in group for run in one.runs]
        try:
            receipts = await self._queue.submit(runs, reply_to=self._reply_to)
        except (QueueFull, RunIdTaken) as error:
            if len(group) == 1:
                _refuse(group, error)
                return
            # Some may fit where all do not. Halves, so that one large call costs few round trips.
            middle = len(group) // 2
            await self._send(group[:middle])
            await self._send(group[middle:])
        except BaseException as error:
            _refuse(group, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._take(receipts)
            for one in group:
                _answer(one)

    def _take(self, receipts: Sequence[SubmitReceipt]) -> None:
        for receipt in receipts:
            if receipt.result is not None:
                self._on_result(receipt.run_id, receipt.result)

    def _give_up(self, one: Submission) -> None:
        if not one.answered.done():
            one.answered.set_exception(QueueUnavailable(f"no receipt within {SUBMIT_S:g} s"))
        if not one.sent:
            _land(one)  # and it will not be sent: see _next_group


def _answer(one: Submission) -> None:
    if not one.answered.done():
        one.answered.set_result(None)
    _land(one)


def _refuse(group: Sequence[Submission], error: BaseException) -> None:
    for one in group:
        if not one.answered.done():
            one.answered.set_exception(
                error if isinstance(error, Exception) else QueueUnavailable("stopped")
            )
        _land(one)


def _land(one: Submission) -> None:
    one.landed = True
    if one.timer is not None:
        one.timer.cancel()
    if one.on_landed is not None:
        one.on_landed()
        one.on_landed = None
