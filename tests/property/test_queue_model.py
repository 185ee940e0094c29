"""The queue against a model of its contract: any order of calls, on the real server."""

import asyncio
import os
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from queue_server import Keys, outcome

from rollyard_queue.base import QueueFull
from rollyard_queue.connections import Server
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import FinishedRun, QueuedRun, SubmitReceipt
from rollyard_queue.redis import RedisQueue

MAX_QUEUED = 6
MAX_ATTEMPTS = 2
FOR_EVER_S = 3600.0

RUN_IDS = [f"r{number}" for number in range(8)]
GATEWAYS = ["g0", "g1", "g2"]
WORKERS = ["w0", "w1", "w2"]

run_ids = st.sampled_from(RUN_IDS)
several_ids = st.lists(run_ids, min_size=1, max_size=4)
gateways = st.sampled_from(GATEWAYS)
workers = st.sampled_from(WORKERS)
counts = st.integers(1, 4)


@dataclass
class Life:
    """One life of a run id, from its submission until its result or its abandonment."""

    state: Literal["queued", "running", "done"]
    job: str
    payload: bytes
    place: int
    waiters: list[str]
    overdue: bool = False  # its deadline has passed
    attempt: int = 0
    base: int = 0
    owner: str = ""
    lapsed: bool = False  # its lease has ended, nobody has reaped it yet
    result: bytes = b""


@dataclass
class Delivered:
    worker: str
    run_id: str
    attempt: int


@dataclass
class Model:
    lives: dict[str, Life] = field(default_factory=dict[str, Life])
    gone: dict[str, int] = field(default_factory=dict[str, int])  # attempts of abandoned lives
    replies: dict[str, list[tuple[str, bytes]]] = field(
        default_factory=lambda: {gateway: [] for gateway in GATEWAYS}
    )
    delivered: list[Delivered] = field(default_factory=list[Delivered])
    finished: int = 0
    redelivered: int = 0
    submitted: int = 0

    def ids(self, state: str) -> list[str]:
        return [run_id for run_id, life in self.lives.items() if life.state == state]

    def end(self, run_id: str, result: bytes) -> None:
        life = self.lives[run_id]
        life.state, life.result = "done", result
        for gateway in life.waiters:
            self.replies[gateway].append((run_id, result))
        self.finished += 1

    def held(self, worker: str, run_id: str) -> bool:
        life = self.lives.get(run_id)
        return life is not None and life.state == "running" and life.owner == worker


class QueueMachine(RuleBasedStateMachine):
    """Each rule makes one call and holds its answer against the model."""

    loop: asyncio.Runner
    url: str

    def __init__(self) -> None:
        super().__init__()
        name = uuid.uuid4().hex
        self.queue = RedisQueue.from_url(
            self.url,
            name=name,
            max_queued=MAX_QUEUED,
            max_attempts=MAX_ATTEMPTS,
            result_ttl_s=FOR_EVER_S,
        )
        self.server = Server.from_url(self.url)
        self.keys = Keys(self.server, name)
        self.model = Model()

    def do[T](self, call: Coroutine[object, None, T]) -> T:
        return self.loop.run(call)

    # Gateways

    @rule(
        ids=several_ids,
        gateway=gateways,
        job=st.sampled_from(["x", "y"]),
        overdue=st.sampled_from([False, False, False, True]),
    )
    def submit(self, ids: list[str], gateway: str, job: str, overdue: bool) -> None:
        model = self.model
        new = {run_id for run_id in ids if run_id not in model.lives}
        batch = [
            QueuedRun(one, f"{one}/{model.submitted}".encode(), job, 0 if overdue else None)
            for one in ids
        ]
        model.submitted += 1
        if new and len(model.ids("queued")) + len(new) > MAX_QUEUED:
            with pytest.raises(QueueFull):
                self.do(self.queue.submit(batch, reply_to=gateway))
            return
        receipts = self.do(self.queue.submit(batch, reply_to=gateway))
        expected = [self._submitted(run, gateway, overdue) for run in batch]
        assert receipts == expected

    def _submitted(self, run: QueuedRun, gateway: str, overdue: bool) -> SubmitReceipt:
        model = self.model
        life = model.lives.get(run.run_id)
        if life is None:
            base = model.gone.pop(run.run_id, 0)
            place = model.submitted * 100 + len(model.lives)
            model.lives[run.run_id] = Life(
                "queued", run.job, run.payload, place, [gateway], overdue, base, base
            )
            return SubmitReceipt(run.run_id, "accepted")
        if life.state == "done":
            return SubmitReceipt(run.run_id, "done", life.result)
        if gateway not in life.waiters:
            life.waiters.append(gateway)
        return SubmitReceipt(run.run_id, "joined")

    @rule(gateway=gateways, count=counts)
    def read_replies(self, gateway: str, count: int) -> None:
        self._read(gateway, count)

    def _read(self, gateway: str, count: int) -> int:
        replies = self.do(self.queue.replies(gateway, max_replies=count, wait_s=0))
        expected = self.model.replies[gateway][:count]
        del self.model.replies[gateway][:count]
        assert [(reply.run_id, reply.result) for reply in replies] == expected
        return len(replies)

    @rule(ids=several_ids)
    def cancel(self, ids: list[str]) -> None:
        before = [self._state(run_id) for run_id in ids]
        seen: set[str] = set()
        for number, run_id in enumerate(ids):
            if run_id in seen and before[number] in ("queued", "running"):
                before[number] = "done"
            seen.add(run_id)
        assert self.do(self.queue.cancel(ids)) == before
        for run_id in dict.fromkeys(ids):
            if self._state(run_id) in ("queued", "running"):
                self._ended(run_id, "cancelled")

    @rule(ids=several_ids, gateway=gateways)
    def abandon(self, ids: list[str], gateway: str) -> None:
        ids = list(dict.fromkeys(ids))
        before = [self._state(run_id) for run_id in ids]
        assert self.do(self.queue.cancel(ids, abandon_by=gateway)) == before
        for run_id in ids:
            life = self.model.lives.get(run_id)
            if life is not None and life.state != "done" and gateway in life.waiters:
                life.waiters.remove(gateway)
                if not life.waiters:
                    del self.model.lives[run_id]
                    if life.attempt:
                        self.model.gone[run_id] = life.attempt

    def _state(self, run_id: str) -> str:
        life = self.model.lives.get(run_id)
        return "unknown" if life is None else life.state

    def _ended(self, run_id: str, expected: str) -> None:
        """Take over a result that the server itself made."""
        result = self.do(self.keys.field(f"run:{run_id}", "result"))
        assert result is not None
        assert outcome(result.encode()) == expected
        self.model.end(run_id, result.encode())

    # Workers

    @rule(worker=workers, count=counts)
    def claim(self, worker: str, count: int) -> None:
        self._claim(worker, count)

    def _claim(self, worker: str, count: int) -> int:
        model = self.model
        queued = model.ids("queued")
        fit = [run_id for run_id in queued if not model.lives[run_id].overdue]
        deliveries = self.do(self.queue.claim(worker, max_runs=count, lease_s=FOR_EVER_S))
        got = [delivery.run_id for delivery in deliveries]
        assert len(set(got)) == len(got) == min(count, len(fit))
        assert set(got) <= set(fit)
        for delivery in deliveries:
            life = model.lives[delivery.run_id]
            life.state, life.owner, life.lapsed = "running", worker, False
            life.attempt += 1
            assert (delivery.attempt, delivery.payload) == (life.attempt, life.payload)
            assert life.attempt - life.base <= MAX_ATTEMPTS
            model.delivered.append(Delivered(worker, delivery.run_id, delivery.attempt))
        self._oldest_first(got, fit)
        self._overdue_met([run_id for run_id in queued if run_id not in got])
        return len(got)

    def _oldest_first(self, got: list[str], fit: list[str]) -> None:
        """Within a job, nothing that was left is older than what was taken."""
        lives = self.model.lives
        for job in ("x", "y"):
            taken = [lives[run_id].place for run_id in got if lives[run_id].job == job]
            left = [
                lives[run_id].place
                for run_id in fit
                if run_id not in got and lives[run_id].job == job
            ]
            assert taken == sorted(taken)
            assert not taken or not left or max(taken) < min(left)

    def _overdue_met(self, ids: list[str]) -> None:
        # How many of them a claim meets depends on the turns of the jobs: ask. The order in which
        # it met them, oldest first in each job, is the order of their replies.
        met = [
            run_id
            for run_id in ids
            if self.model.lives[run_id].overdue
            and self.do(self.keys.field(f"run:{run_id}", "state")) == "done"
        ]
        for run_id in met:
            self._ended(run_id, "expired")
        self._order_of_replies()

    def _order_of_replies(self) -> None:
        """Results that one call made come in the server's order; the model takes it over."""
        for gateway in GATEWAYS:
            expected = self.model.replies[gateway]
            stored = self.do(self.keys.replies(gateway, len(expected)))
            assert sorted(stored) == sorted(expected)
            self.model.replies[gateway] = stored

    @precondition(lambda self: self.model.delivered)
    @rule(data=st.data(), result=st.binary(max_size=8))
    def finish(self, data: st.DataObject, result: bytes) -> None:
        """Any delivery ever made reports: in time, late, again, or twice in one call."""
        chosen = data.draw(st.lists(st.sampled_from(self.model.delivered), min_size=1, max_size=3))
        worker = chosen[0].worker
        reports = [one for one in chosen if one.worker == worker]
        expected = [self._finished(one, result) for one in reports]
        finished = [FinishedRun(one.run_id, one.attempt, result) for one in reports]
        assert self.do(self.queue.finish(worker, finished)) == expected

    def _finished(self, report: Delivered, result: bytes) -> bool:
        held = self.model.held(report.worker, report.run_id)
        if not held or self.model.lives[report.run_id].attempt != report.attempt:
            return False
        self.model.end(report.run_id, result)
        return True

    @rule(worker=workers, ids=several_ids)
    def renew(self, worker: str, ids: list[str]) -> None:
        self._renew(worker, ids, FOR_EVER_S)

    @rule(worker=workers, ids=several_ids)
    def stay_silent_until_the_lease_ends(self, worker: str, ids: list[str]) -> None:
        self._renew(worker, ids, 0)

    def _renew(self, worker: str, ids: list[str], lease_s: float) -> None:
        lost = [run_id for run_id in ids if not self.model.held(worker, run_id)]
        assert self.do(self.queue.renew(worker, ids, lease_s=lease_s)) == lost
        for run_id in ids:
            if run_id not in lost:
                self.model.lives[run_id].lapsed = lease_s == 0

    @rule(worker=workers, ids=several_ids)
    def release(self, worker: str, ids: list[str]) -> None:
        held = {run_id for run_id in ids if self.model.held(worker, run_id)}
        assert self.do(self.queue.release(worker, ids)) == len(held)
        for run_id in held:
            life = self.model.lives[run_id]
            life.state, life.owner, life.lapsed = "queued", "", False
            life.attempt -= 1
        # An unstarted run makes no report.
        self.model.delivered = [
            one
            for one in self.model.delivered
            if not (
                one.run_id in held
                and one.worker == worker
                and one.attempt == self.model.lives[one.run_id].attempt + 1
            )
        ]

    @rule()
    def reap(self) -> None:
        model = self.model
        lapsed = [run_id for run_id in model.ids("running") if model.lives[run_id].lapsed]
        for run_id in lapsed:
            life = model.lives[run_id]
            life.lapsed = False
            if life.attempt - life.base < MAX_ATTEMPTS:
                life.state, life.owner = "queued", ""
                model.redelivered += 1
        overdue = [run_id for run_id in model.ids("queued") if model.lives[run_id].overdue]
        touched = self.do(self.queue.reap())
        # A redelivered run that is overdue is touched twice.
        assert touched == len(lapsed) + len(overdue)
        for run_id in lapsed:
            if model.lives[run_id].state == "running":
                self._ended(run_id, "infra_error")
        for run_id in overdue:
            self._ended(run_id, "expired")
        self._order_of_replies()

    @rule(worker=workers)
    def hear_what_to_stop(self, worker: str) -> None:
        notice = self.do(self.queue.wait(worker, for_work=False, wait_s=0))
        assert not notice.work
        for run_id in notice.cancelled:
            assert not self.model.held(worker, run_id)

    # At any time

    @invariant()
    def the_counts_are_right(self) -> None:
        stats = self.do(self.queue.stats())
        lives = self.model.lives
        queued = self.model.ids("queued")
        assert stats.queued == len(queued)
        assert stats.leased == len(self.model.ids("running"))
        assert stats.queued_bytes == sum(len(lives[run_id].payload) for run_id in queued)
        assert stats.finished_total == self.model.finished
        assert stats.redelivered_total == self.model.redelivered

    @invariant()
    def work_has_a_wake_or_none_is_needed(self) -> None:
        # Nobody waits for work here, so that no token can be on its way to a worker.
        if self.model.ids("queued"):
            assert "wake" in self.do(self.keys.all())

    def teardown(self) -> None:
        try:
            self._to_the_end()
        finally:
            self.do(self.queue.close())
            self.do(self.server.close())

    def _to_the_end(self) -> None:
        """Finish everything: each waiter gets its result, and nothing is left."""
        for worker in WORKERS:
            self._renew(worker, RUN_IDS, 0)
        self.reap()
        while self._claim("w0", 3):
            pass
        for report in list(self.model.delivered):
            expected = self._finished(report, b"end")
            finished = [FinishedRun(report.run_id, report.attempt, b"end")]
            assert self.do(self.queue.finish(report.worker, finished)) == [expected]
        assert set(self.model.ids("done")) == set(self.model.lives)
        for gateway in GATEWAYS:
            while self._read(gateway, 5):
                pass
            assert self.model.replies[gateway] == []
        assert self.do(self.keys.lasting()) == set()


def test_any_order_of_calls_keeps_the_contract():
    with asyncio.Runner() as runner:
        server = EmbeddedServer()
        runner.run(server.start())

        class Machine(QueueMachine):
            loop = runner
            url = server.url

        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=60,
                    stateful_step_count=40,
                    deadline=None,
                    derandomize="CI" in os.environ,
                    database=None,
                    # A step is several round trips to a real server.
                    suppress_health_check=[HealthCheck.too_slow],
                ),
            )
        finally:
            runner.run(server.stop())
