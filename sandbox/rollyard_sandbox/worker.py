"""The worker: takes runs from the queue, gives each to a slot, reports results in batches."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time

import msgspec

from rollyard_queue.base import Queue, QueueError
from rollyard_queue.records import Delivery, FinishedRun, Notice, RunSpec
from rollyard_sandbox import reports
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.gate import PLACES_FOR_EACH_CORE, StartGate
from rollyard_sandbox.jail import JailError
from rollyard_sandbox.metrics import Held, WorkerMetrics
from rollyard_sandbox.outbox import Outbox
from rollyard_sandbox.pool import Pool
from rollyard_sandbox.presence import ANNOUNCE_TTL_S, Presence
from rollyard_sandbox.slots import SlotLost

log = logging.getLogger(__name__)

_WAIT_S = 1.0
_BACK_OFF_S = 0.5
_FAILURES_FOR_EACH_LINE = 60
# A slot that served before, then two new ones: a template that dies takes clones with it.
_TRIES = (False, True, True)
# Claimed but not started: enough to keep the cores busy between two claims, few enough that
# another worker's free core finds work in the queue.
_PREFETCH_FOR_EACH_CORE = 8
_spec_decoder = msgspec.json.Decoder(RunSpec)


def new_worker_id() -> str:
    """A name that no other worker has, and that says where it runs."""
    host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())
    return f"{host[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


class _Running:
    """One claimed run; its execution, once it has begun."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.claimed = time.monotonic()
        self.execution: Execution | None = None
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        if self.execution is not None:
            self.execution.stop("cancelled")


class Worker:
    """Drains one queue into one pool until told to stop."""

    def __init__(
        self, queue: Queue, pool: Pool, *, worker_id: str, slots: int, lease_s: float,
        drain_s: float, degraded: list[str], metrics: WorkerMetrics,
    ) -> None:  # fmt: skip
        self._queue = queue
        self._pool = pool
        self._id = worker_id
        self._slots = slots
        self._lease_s = lease_s
        self._drain_s = drain_s
        self._degraded = degraded
        self._metrics = metrics
        cores = len(os.sched_getaffinity(0))
        self._gate = StartGate(PLACES_FOR_EACH_CORE * cores)
        self._prefetch = _PREFETCH_FOR_EACH_CORE * cores
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox = Outbox(queue, worker_id)
        self._presence = Presence(queue, worker_id, slots=slots, lease_s=lease_s)
        self._freed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failures = 0  # calls of the queue that failed in a row
        metrics.watch(pool, self._held)

    def stop(self) -> None:
        """Claim no more; run() returns when the running runs have ended or drain_s is over."""
        self._stopping.set()

    def _held(self) -> Held:
        starting = self._gate.waiting
        running = max(0, len(self._running) - starting)
        return Held(starting, running, len(self._outbox), self._outbox.given_up)

    async def run(self) -> None:
        """Serve until stop()."""
        await self._join()
        failed = self._metrics.count_queue_error
        async with self._presence.kept(self._outbox, renew=self._renew, failed=failed):
            await self._serve()
            await self._drain()

    async def _join(self) -> None:
        """Announce this worker; a queue that is not there yet is waited for."""
        while not self._stopping.is_set():
            try:
                await self._presence.announce()
            except QueueError as error:
                await self._back_off(error)
            else:
                self._failures = 0
                log.info("worker.ready", extra={"slots": self._slots, "worker_id": self._id})
                return

    # Taking work ------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._serve_once()
            except QueueError as error:
                self._metrics.count_queue_error()
                await self._back_off(error)
            else:
                if self._failures:
                    log.info("queue.back")
                self._failures = 0

    async def _back_off(self, error: QueueError) -> None:
        """Wait before the next try; an outage is logged when it begins, then each half minute."""
        if self._failures % _FAILURES_FOR_EACH_LINE == 0:
            log.warning("queue.unavailable", extra={"reason": str(error)})
        self._failures += 1
        await asyncio.sleep(_BACK_OFF_S)

    async def _serve_once(self) -> None:
        notice = await self._wait()
        for run_id in notice.cancelled:
            self._stop_run(run_id)
        room = self._room()
        if notice.work and room > 0 and not self._stopping.is_set():
            claimed = await self._queue.claim(self._id, max_runs=room, lease_s=self._lease_s)
            self._metrics.count_claim(claimed)
            for delivery in claimed:
                self._begin(delivery)

    def _room(self) -> int:
        """How many more runs to claim; none while results wait for a slow queue."""
        if self._outbox.full:
            return 0
        if self._gate.waiting > self._prefetch // 2:
            return 0  # a claim for one run costs as much as one for eight
        return min(self._slots - len(self._running), self._prefetch - self._gate.waiting)

    async def _wait(self) -> Notice:
        """Wait for work, a cancellation, or (when full) for room; say ``work`` if interrupted.

        A full worker leaves wake-ups to others, so it must come back as soon as it has room. An
        interrupted wait may have taken a wake-up with it: the queue asks for a claim then.
        """
        full = self._room() <= 0
        wait = asyncio.create_task(self._queue.wait(self._id, for_work=not full, wait_s=_WAIT_S))
        stop = asyncio.create_task(self._stopping.wait())
        try:
            while not (wait.done() or self._stopping.is_set() or (full and self._room() > 0)):
                self._freed.clear()
                freed = asyncio.create_task(self._freed.wait())
                others = {stop, freed} if full else {stop}
                await asyncio.wait({wait, *others}, return_when=asyncio.FIRST_COMPLETED)
                freed.cancel()
            return wait.result() if wait.done() else Notice(work=True)
        finally:
            for task in (wait, stop):
                task.cancel()
            await asyncio.gather(wait, stop, return_exceptions=True)

    def _begin(self, delivery: Delivery) -> None:
        running = _Running(delivery)
        # Our lease ended and the run came back to us: the newer attempt is the one that counts.
        self._stop_run(delivery.run_id)
        self._running[delivery.run_id] = running
        task = asyncio.create_task(self._execute(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stop_run(self, run_id: str) -> None:
        if running := self._running.get(run_id):
            running.stop()

    # One run ----------------------------------------------------------------------------------

    async def _execute(self, running: _Running) -> None:
        delivery = running.delivery
        try:
            result = await self._result(running)
        except Exception as error:  # the last boundary: a run that we fail must still be answered
            log.exception("run.fault", extra={"run_id": delivery.run_id})
            result = self._fault(delivery, f"worker fault: {error!r}")
        if self._running.get(delivery.run_id) is running:
            del self._running[delivery.run_id]
        self._freed.set()
        # What we stopped is no longer ours: it has been answered, or went to others. Its end here
        # must not pass for a result: a server that lost its memory counts attempts from 1 again,
        # and would take it for the new life's.
        if not running.stopped:
            self._outbox.put(FinishedRun(delivery.run_id, delivery.attempt, result))

    async def _result(self, running: _Running) -> bytes:
        delivery = running.delivery
        try:
            spec = _spec_decoder.decode(delivery.payload)
        except msgspec.DecodeError as error:
            return self._fault(delivery, f"unreadable run record: {error}")
        template = self._pool.choose(spec)
        if template is None:
            text = f"no worker here has language {spec.language!r}; see rollyard doctor"
            return self._fault(delivery, text)
        reason = ""
        for new_slot in _TRIES:
            try:
                return await self._try(running, spec, template, new_slot=new_slot)
            except (SlotLost, JailError, OSError) as error:
                reason = str(error)
                self._metrics.count_lost_slot()
                log.error("slot.lost", extra={"run_id": delivery.run_id, "reason": reason})
                if isinstance(error, SlotLost) and error.evidence.oom_kills:
                    # The kernel took PID 1 at the run's own memory limit: that is a verdict.
                    return self._encode(
                        running, template, "memory",
                        f"memory limit of {spec.limits.memory_bytes} bytes reached",
                        reports.SlotReport(), error.evidence,
                    )  # fmt: skip
                if running.stopped:
                    break
        return self._fault(delivery, f"sandbox fault: {reason}")

    def _fault(self, delivery: Delivery, message: str) -> bytes:
        self._metrics.count_fault()
        return reports.infra_error(delivery, self._id, message)

    async def _try(
        self, running: _Running, spec: RunSpec, template: str, *, new_slot: bool
    ) -> bytes:
        limits = spec.limits
        place = await self._gate.enter()
        self._freed.set()
        try:
            slot = await self._pool.acquire(template, limits.disk_bytes, new=new_slot)
            try:
                if running.stopped:
                    report, evidence = reports.SlotReport(killed="cancelled"), reports.Evidence()
                else:
                    place.watch(slot.computes)
                    running.execution = Execution(slot, spec)
                    report, evidence = await running.execution.run()
            finally:
                running.execution = None
                await self._pool.release(slot)
        finally:
            place.leave()
        if evidence.foreign_kills and report.exit_code != 0 and not report.killed:
            raise SlotLost("this machine ran out of memory, not the run", evidence)
        outcome, message = reports.judge(report, evidence, msgspec.structs.asdict(limits))
        if report.left_out:
            note = f"too large or too many to return: {', '.join(report.left_out[:5])}"
            message = f"{message}; {note}" if message else note
        return self._encode(running, template, outcome, message, report, evidence)

    def _encode(
        self, running: _Running, template: str, outcome: str, message: str,
        report: reports.SlotReport, evidence: reports.Evidence,
    ) -> bytes:  # fmt: skip
        delivery = running.delivery
        since_claim_ms = (time.monotonic() - running.claimed) * 1e3
        record = reports.ResultRecord(
            run_id=delivery.run_id,
            outcome=outcome,
            phase=report.phase,
            exit_code=report.exit_code,
            signal=report.signal,
            stdout=report.stdout,
            stderr=report.stderr,
            stdout_truncated=report.stdout_truncated,
            stderr_truncated=report.stderr_truncated,
            files=report.files,
            wall_ms=report.wall_ms,
            cpu_ms=report.cpu_ms,
            peak_memory_bytes=evidence.peak_memory_bytes,
            # Waiting for a slot is waiting too.
            queued_ms=round(delivery.queued_ms + max(0.0, since_claim_ms - report.wall_ms), 3),
            attempt=delivery.attempt,
            worker_id=self._id,
            template=template,
            degraded=self._degraded,
            message=message,
        )
        self._metrics.observe(record)
        return reports.encode(record)

    async def _renew(self) -> None:
        if self._running:
            asked = dict(self._running)
            lost = await self._queue.renew(self._id, list(asked), lease_s=self._lease_s)
            self._metrics.count_renewal(len(asked), len(lost))
            for run_id in lost:
                # The one we asked about: it may have come back to us as a newer attempt meanwhile.
                asked[run_id].stop()

    # Ending -----------------------------------------------------------------------------------

    async def _drain(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._drain_s)
        left = list(self._running)
        if left:
            log.warning("drain.unfinished", extra={"runs": len(left)})
            with contextlib.suppress(QueueError):
                # Handed back first, so that their ends here are not taken for results.
                await self._queue.release(self._id, left)
            for run_id in left:
                self._stop_run(run_id)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=ANNOUNCE_TTL_S)
