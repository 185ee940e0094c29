"""The queue's contract.

At least once with leases, at most one result: a run id is answered exactly once per waiting
caller, however often it is submitted, delivered, finished or retried. All times that decide
anything are the server's own; no machine's clock is compared with another's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rollyard_queue.records import (
    Delivery,
    FinishedRun,
    Notice,
    QueuedRun,
    QueueStats,
    Reply,
    SubmitReceipt,
)


class QueueError(Exception):
    """Base of what the queue raises."""


class QueueUnavailable(QueueError):
    """The server did not answer, or is out of memory. Nothing is known of the operation."""


class QueueFull(QueueError):
    """Admission would pass the queue's bounds; nothing of the batch was queued.

    ``job`` is the job whose own bound it is, or empty where it is the whole queue's.
    """

    def __init__(self, message: str, *, retry_after_s: float, job: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.job = job


class RunIdTaken(QueueError):
    """An id belongs to a run with another content; nothing of the batch was queued.

    ``run_ids`` are those of the batch of which that is true.
    """

    def __init__(self, run_ids: Sequence[str]) -> None:
        more = f" (and {len(run_ids) - 1} more)" if len(run_ids) > 1 else ""
        super().__init__(f"run id {run_ids[0]!r}{more} belongs to another program")
        self.run_ids = tuple(run_ids)


class Queue(ABC):
    """One queue, as gateways and workers see it. Every method raises QueueUnavailable."""

    @abstractmethod
    async def submit(self, runs: Sequence[QueuedRun], *, reply_to: str) -> list[SubmitReceipt]:
        """Queue a batch in one round trip, all or nothing; receipts in order.

        ``reply_to`` names the reply list of the waiting gateway process. A run that was
        abandoned earlier (see cancel) starts anew. Runs of one id are one run, unless both have
        a digest and these differ.

        Raises:
            QueueFull: the batch does not fit.
            RunIdTaken: the queue knows an id, for as long as the result is kept, with another
                digest.
        """

    @abstractmethod
    async def cancel(self, run_ids: Sequence[str], *, abandon_by: str | None = None) -> list[str]:
        """Cancel runs that are queued or running; answer the state met, in order.

        States: ``queued``, ``running``, ``done``, ``unknown``. Without ``abandon_by`` each live
        run ends with outcome ``cancelled``, which is stored and sent to all who wait. With it,
        that gateway merely stops waiting; only when nobody else waits is the run dropped without
        a result, so that a later submit of the same id runs anew. The worker of a running run is
        told through wait().
        """

    @abstractmethod
    async def wait(self, worker_id: str, *, for_work: bool, wait_s: float) -> Notice:
        """Wait for work (if asked for) or for cancellations addressed to this worker.

        Blocks on a connection of its own, at most ``wait_s`` seconds.
        """

    @abstractmethod
    async def claim(self, worker_id: str, *, max_runs: int, lease_s: float) -> list[Delivery]:
        """Take up to ``max_runs`` queued runs under a lease, without waiting.

        Jobs take turns; within a job the highest priority goes first, then the earliest deadline,
        then the oldest. A job at its cap of running runs is passed over. Runs past their deadline
        are answered ``expired`` on the way and not delivered.
        """

    @abstractmethod
    async def renew(self, worker_id: str, run_ids: Sequence[str], *, lease_s: float) -> list[str]:
        """Extend leases; return the ids that this worker no longer holds (stop those)."""

    @abstractmethod
    async def finish(self, worker_id: str, finished: Sequence[FinishedRun]) -> list[bool]:
        """Record results in one round trip; False where another result or owner was first.

        Where runs of several parts are given (see part_of) and one part does not answer, the
        others' results are recorded all the same, and all may be given again.
        """

    @property
    def parts(self) -> int:
        """Of how many parts the queue consists, which may be away one without the others."""
        return 1

    def part_of(self, run_id: str) -> int:
        """The part that has this run, counted from 0."""
        return 0

    @abstractmethod
    async def release(self, worker_id: str, run_ids: Sequence[str]) -> int:
        """Give unstarted runs back to the front of the queue; their attempt is not counted."""

    @abstractmethod
    async def announce(self, worker_id: str, *, slots: int, ttl_s: float) -> None:
        """Tell the queue that this worker lives, for stats."""

    @abstractmethod
    async def retire(self, worker_id: str) -> None:
        """Forget a worker that stops; leases it still holds are left to reap()."""

    @abstractmethod
    async def reap(self) -> int:
        """Redeliver runs whose lease ended; answer ``infra_error`` for one delivered too often.

        The last attempt of a run is on probation: a worker holds at most one such run, so that a
        run that kills its workers takes no other with it to its end. Safe to call from every
        worker and gateway at once. Returns how many were touched.
        """

    @abstractmethod
    async def replies(self, reply_to: str, *, max_replies: int, wait_s: float) -> list[Reply]:
        """Wait for results addressed to a gateway process and take them."""

    @abstractmethod
    async def stats(self) -> QueueStats:
        """Counts for /v1/stats, admission and autoscaling."""

    @abstractmethod
    async def ping(self) -> None:
        """Return if the server answers; of several servers, any."""

    @abstractmethod
    async def ready(self) -> None:
        """Return if runs would be taken now.

        Raises:
            QueueUnavailable: no, and the message says to an operator why, and what to do: a server
                does not answer, is full, read-only, too old, or wants another password.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""
