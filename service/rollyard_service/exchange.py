"""The table of who waits for which run, and the tasks that keep it true.

One reader per process takes results from this process's reply list and hands each to every call
that waits for its id. A call always ends: with real results, or with ``infra_error`` once its
patience is over. Nothing that Valkey forgets, and no reply lost on the way, leaves a call hanging:
what has waited long, or across an outage, is submitted again under its id, which joins the run if
the queue still knows it, fetches its result if it has ended, and runs it anew otherwise.
"""

import asyncio
import functools
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from uuid import uuid4

import msgspec

from rollyard_queue.base import Queue, QueueFull, QueueUnavailable, RunIdTaken
from rollyard_queue.records import QueuedRun
from rollyard_service.abandonment import Abandonment
from rollyard_service.call import Call
from rollyard_service.load import Load
from rollyard_service.metrics import Metrics
from rollyard_service.submissions import Submissions
from rollyard_service.verdict import infra_error

READ_WAIT_S = 5.0
"""One wait on the reply list; longer saves nothing, shorter notices a stop of Valkey earlier."""
READ_BATCH = 512
"""Replies taken in one round trip."""
BACKOFF_S = (0.05, 1.0)
"""First and largest pause between two tries to reach the queue; each doubles."""
AUDIT_S = 15.0
"""A run that has waited this long since it was last submitted is submitted again (a join)."""
AUDIT_BATCH = 64
REAP_S = 2.0
"""Mean pause between two reaps; each is drawn from half to one and a half of it."""

logger = logging.getLogger(__name__)


class Exchange:
    """Submits calls and brings their results. All methods belong to one event loop."""

    def __init__(self, queue: Queue, *, metrics: Metrics, load: Load) -> None:
        self.reply_to = f"gw-{uuid4().hex}"
        self._queue = queue
        self._metrics = metrics
        self._load = load
        self._waiting: dict[str, list[Call]] = {}
        self._calls: dict[Call, list[asyncio.TimerHandle]] = {}
        self._abandonment = Abandonment(
            queue, reply_to=self.reply_to, is_wanted=self._waiting.__contains__
        )
        self._submissions = Submissions(queue, reply_to=self.reply_to, on_result=self._deliver)
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = False

    def __len__(self) -> int:
        """Runs that callers of this process wait for."""
        return len(self._waiting)

    def start(self) -> None:
        """Start the reader, the audit, the reaper and the sender of cancellations."""
        steps = (self._read, self._audit, self._reap, self._abandonment.step)
        self._tasks = [asyncio.create_task(_forever(step)) for step in steps]

    async def close(self) -> None:
        """Cancel what nobody waits for any more, as far as the queue answers, and stop.

        Runs of calls that still wait go on: whoever sends their ids again joins them.
        """
        for call in list(self._calls):
            self.drop(call, abandon=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._submissions.close()
        await self._abandonment.flush()

    def stop_calls(self) -> None:
        """Wake every call: the process stops before their runs end."""
        for call in list(self._calls):
            call.stop()

    async def submit(self, call: Call) -> None:
        """Queue a call's runs in one round trip and have their results delivered to it.

        The caller must drop() the call when it stops waiting, whatever happened.

        Raises:
            QueueFull, RunIdTaken: nothing was queued.
            QueueUnavailable: the runs may or may not be queued; they are abandoned.
        """
        await self._abandonment.settled(call.run_ids)
        self._register(call)  # first, for a reply may overtake the receipts
        submission = self._submissions.add(
            list(call.pending.values()), size_bytes=call.payload_bytes
        )
        try:
            await submission.answered
            self._metrics.count_admitted(len(call.run_ids))
            self._load.submitted(len(call.run_ids), call.payload_bytes)
        except (QueueFull, RunIdTaken) as error:
            reason = "overloaded" if isinstance(error, QueueFull) else "conflict"
            self._metrics.count_not_admitted(len(call.run_ids), reason)
            self.drop(call, abandon=False)
            raise
        except BaseException as error:
            if isinstance(error, QueueUnavailable):
                self._metrics.count_not_admitted(len(call.run_ids), "unavailable")
                self._load.failed(str(error))
            self.drop(call, abandon=submission.landed)
            if not submission.landed:
                submission.on_landed = functools.partial(self._abandon_unwanted, call.run_ids)
            raise

    def drop(self, call: Call, *, abandon: bool = True) -> None:
        """Stop waiting for what is outstanding; the rest of a call that is done is nothing.

        Runs that nobody else here waits for are cancelled, unless ``abandon`` is False.
        """
        for timer in self._calls.pop(call, ()):
            timer.cancel()
        for run_id in call.pending:
            self._unlink(run_id, call, abandon=abandon)

    def _register(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        for run_id in call.run_ids:
            self._waiting.setdefault(run_id, []).append(call)
        self._calls[call] = [
            loop.call_later(patience_s, self._lose_patience, call, patience_s)
            for patience_s in call.patience
        ]

    def _unlink(self, run_id: str, call: Call, *, abandon: bool) -> None:
        calls = self._waiting.get(run_id, [])
        if call in calls:
            calls.remove(call)
            if not calls:
                del self._waiting[run_id]
                if abandon:
                    self._abandonment.add(run_id)

    def _deliver(self, run_id: str, result: bytes) -> float | None:
        """Hand a result to all who wait; when the first of them came, None: nobody waits."""
        calls = self._waiting.pop(run_id, ())
        for call in calls:
            call.deliver(run_id, result)
        return calls[0].created if calls else None

    def _lose_patience(self, call: Call, patience_s: float) -> None:
        message = (
            f"no result within {patience_s:g} s (limits.timeout_s, the server's longest wait for"
            " a worker and some slack); the gateway stopped waiting"
        )
        overdue = [run_id for run_id in call.patience[patience_s] if run_id in call.pending]
        for run_id in overdue:
            self._unlink(run_id, call, abandon=True)
            result = infra_error(run_id, message)
            call.deliver(run_id, result)
            self._metrics.count_results([(result, patience_s)])
        if overdue:
            logger.warning("run.overdue", extra={"runs": len(overdue), "patience_s": patience_s})

    async def _ask(self, runs: list[QueuedRun]) -> None:
        if not runs:
            return
        try:
            receipts = await self._queue.submit(runs, reply_to=self.reply_to)
        except RunIdTaken as error:
            # The queue had forgotten these, and took another program under their ids meanwhile.
            for run_id in error.run_ids:
                self._deliver(run_id, infra_error(run_id, f"the run was lost, and {error}"))
            await self._ask([run for run in runs if run.run_id not in error.run_ids])
            return
        for receipt in receipts:
            if receipt.result is not None:
                self._deliver(receipt.run_id, receipt.result)

    async def _read(self) -> None:
        if self._lost:
            await self._wait_for_queue()
            logger.warning("queue.back", extra={"waiting": len(self)})
            # Replies may have died with the connection, and runs with the server.
            await self._ask_again(self._calls)
            self._lost = False
            self._load.answered()
        try:
            replies = await self._queue.replies(
                self.reply_to, max_replies=READ_BATCH, wait_s=READ_WAIT_S
            )
        except QueueUnavailable as error:
            logger.warning("queue.lost", extra={"reason": str(error)})
            self._lost = True
            return
        now = asyncio.get_running_loop().time()
        self._metrics.count_results(
            (reply.result, now - came)
            for reply in replies
            if (came := self._deliver(reply.run_id, reply.result)) is not None
        )

    async def _wait_for_queue(self) -> None:
        pause_s, longest_s = BACKOFF_S
        while True:
            try:
                return await self._queue.ping()
            except QueueUnavailable:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
                pause_s = min(2 * pause_s, longest_s)

    async def _audit(self) -> None:
        await asyncio.sleep(AUDIT_S / 3)
        oldest = asyncio.get_running_loop().time() - AUDIT_S
        await self._ask_again(call for call in self._calls if call.asked < oldest)

    async def _ask_again(self, calls: Iterable[Call]) -> None:
        now = asyncio.get_running_loop().time()
        runs: dict[str, QueuedRun] = {}
        for call in calls:
            call.asked = now
            age_ms = round((now - call.created) * 1000)
            runs |= {run_id: _aged(run, age_ms) for run_id, run in call.pending.items()}
        run_ids = list(runs)
        for start in range(0, len(run_ids), AUDIT_BATCH):
            batch = run_ids[start : start + AUDIT_BATCH]
            await self._abandonment.settled(batch)
            wanted = [runs[run_id] for run_id in batch if run_id in self._waiting]
            try:
                self._metrics.count_asked_again(len(wanted))
                await self._ask(wanted)
            except QueueFull as error:
                # The next audit asks again; the queue has the runs that it still knows.
                logger.warning("run.ask_again_refused", extra={"reason": str(error)})
            # Those dropped meanwhile were perhaps queued anew.
            self._abandon_unwanted(run.run_id for run in wanted)

    def _abandon_unwanted(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            if run_id not in self._waiting:
                self._abandonment.add(run_id)

    async def _reap(self) -> None:
        await asyncio.sleep(REAP_S * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        touched = await self._queue.reap()
        if touched:
            self._metrics.count_reaped(touched)
            logger.warning("queue.reaped", extra={"runs": touched})


def _aged(run: QueuedRun, age_ms: int) -> QueuedRun:
    if run.expires_in_ms is None:
        return run
    return msgspec.structs.replace(run, expires_in_ms=max(1, run.expires_in_ms - age_ms))


async def _forever(step: Callable[[], Awaitable[None]]) -> None:
    """Repeat a step for as long as the process lives; a fault in it ends neither."""
    while True:
        try:
            await step()
        except QueueUnavailable:
            await asyncio.sleep(BACKOFF_S[1])
        except Exception:
            logger.exception("gateway.task_failed", extra={"step": step.__qualname__})
            await asyncio.sleep(BACKOFF_S[1])
