"""The queue against a model of its contract: any order of calls, on the real server."""

import asyncio
import os
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Literal, cast

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

from rollyard_queue.base import QueueFull, RunIdTaken
from rollyard_queue.connections import Server
from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import FinishedRun, QueuedRun, SubmitReceipt
from rollyard_queue.redis import RedisQueue

MAX_QUEUED = 6
MAX_QUEUED_PER_JOB = 5
MAX_RUNNING_PER_JOB = 2
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
# ms until the deadline: passed, named and far, or not named. In the order of their turn.
DEADLINES = [0, 3_600_000, 7_200_000, None]
JOBS = ["x", "y"]
# Mostly one, or each batch would be refused; "" is of a gateway that makes none.
DIGESTS = [*[b"content1"] * 9, b"", b"content2"]


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[str, str, int, int | None, bytes]]:
    """Some runs: id, job, priority, deadline and digest of each."""
    return [
        (
            draw(run_ids),
            draw(st.sampled_from(JOBS)),
            draw(st.sampled_from([0, 0, -3, 7])),
            draw(st.sampled_from([None, None, *DEADLINES])),
            draw(st.sampled_from(DIGESTS)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


@dataclass
class Life:
    """One life of a run id, from its submission until its result or its abandonment."""

    state: Literal["queued", "running", "done"]
    job: str
    payload: bytes
    turn: tuple[int, int, int]  # within the job, least first
    waiters: list[str]
    overdue: bool = False  # its deadline has passed
    attempt: int = 0
    base: int = 0
    owner: str = ""
    lapsed: bool = False  # its lease has ended, nobody has reaped it yet
    probation: bool = False  # it has one attempt left
    result: bytes = b""
    digest: bytes = b""


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

    def queued(self, job: str) -> list[str]:
        """In the job's own queue, overdue ones too."""
        return [
            run_id
            for run_id in self.ids("queued")
            if self.lives[run_id].job == job and not self.lives[run_id].probation
        ]

    def room(self, job: str) -> int:
        running = [run_id for run_id in self.ids("running") if self.lives[run_id].job == job]
        return MAX_RUNNING_PER_JOB - len(running)

    def on_trial(self, worker: str) -> bool:
        return any(
            life.probation and life.state == "running" and life.owner == worker
            for life in self.lives.values()
        )

    def held(self, worker: str, run_id: str) -> bool:
        life = self.lives.get(run_id)
        return life is not None and life.state == "running" and life.owner == worker


class QueueMachine(RuleBasedStateMachine):
    """Each rule makes one call and holds its answer against the model."""

    loop: asyncio.Runner
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.name = uuid.uuid4().hex
        self.queues: dict[str, RedisQueue] = {}
        self.dead: list[RedisQueue] = []
        self.server = Server.from_url(self.url)
        self.keys = Keys(self.server, self.name)
        self.model = Model()

    def do[T](self, call: Coroutine[object, None, T]) -> T:
        return self.loop.run(call)

    def by(self, process: str) -> RedisQueue:
        """The queue as one gateway or worker has it."""
        if process not in self.queues:
            self.queues[process] = RedisQueue.from_url(
                self.url,
                name=self.name,
                max_queued=MAX_QUEUED,
                max_queued_per_job=MAX_QUEUED_PER_JOB,
                max_running_per_job=MAX_RUNNING_PER_JOB,
                max_attempts=MAX_ATTEMPTS,
                result_ttl_s=FOR_EVER_S,
            )
        return self.queues[process]

    def dies(self, process: str) -> None:
        """Without a last word to the server; its successor has its name and nothing else."""
        if process in self.queues:
            self.dead.append(self.queues.pop(process))

    # Gateways

    @rule(batch=batches(), gateway=gateways)
    def submit(self, batch: list[tuple[str, str, int, int | None, bytes]], gateway: str) -> None:
        model = self.model
        model.submitted += 1
        runs = [
            QueuedRun(
                run_id, f"{run_id}/{model.submitted}".encode(), job, deadline, priority, digest
            )
            for run_id, job, priority, deadline, digest in batch
        ]
        if taken := self._taken(runs):
            with pytest.raises(RunIdTaken) as refused:
                self.do(self.by(gateway).submit(runs, reply_to=gateway))
            assert list(refused.value.run_ids) == taken
            return
        over = self._over(runs)
        if over:
            with pytest.raises(QueueFull) as full:
                self.do(self.by(gateway).submit(runs, reply_to=gateway))
            assert full.value.job in over
            return
        receipts = self.do(self.by(gateway).submit(runs, reply_to=gateway))
        assert receipts == [self._submitted(run, gateway) for run in runs]

    def _taken(self, runs: list[QueuedRun]) -> list[str]:
        """Ids that stand for another content, of an earlier run or of one of this batch."""
        first = {run.run_id: run.digest for run in reversed(runs)}
        known = first | {run_id: life.digest for run_id, life in self.model.lives.items()}
        return [
            run.run_id
            for run in runs
            if run.digest and known[run.run_id] and run.digest != known[run.run_id]
        ]

    def _over(self, runs: list[QueuedRun]) -> list[str]:
        """Whose bound the batch would pass: the queue's, which has no name, or some jobs'."""
        model = self.model
        new = {run.run_id: run.job for run in reversed(runs) if run.run_id not in model.lives}
        if new and len(model.ids("queued")) + len(new) > MAX_QUEUED:
            return [""]
        jobs = list(new.values())
        return [
            job
            for job in JOBS
            if job in jobs and len(model.queued(job)) + jobs.count(job) > MAX_QUEUED_PER_JOB
        ]

    def _submitted(self, run: QueuedRun, gateway: str) -> SubmitReceipt:
        model = self.model
        life = model.lives.get(run.run_id)
        if life is None:
            base = model.gone.pop(run.run_id, 0)
            place = model.submitted * 100 + len(model.lives)
            turn = (-run.priority, DEADLINES.index(run.expires_in_ms), place)
            overdue = run.expires_in_ms == 0
            model.lives[run.run_id] = Life(
                "queued",
                run.job,
                run.payload,
                turn,
                [gateway],
                overdue,
                base,
                base,
                digest=run.digest,
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
        replies = self.do(self.by(gateway).replies(gateway, max_replies=count, wait_s=0))
        # The rest of what was sent together comes alone, without a look at what else there is.
        expected = self.model.replies[gateway][: len(replies)]
        assert len(replies) <= count
        assert bool(replies) == bool(self.model.replies[gateway])
        del self.model.replies[gateway][: len(replies)]
        assert [(reply.run_id, reply.result) for reply in replies] == expected
        return len(replies)

    @rule(gateway=gateways, count=counts)
    def a_gateway_dies_with_what_it_read(self, gateway: str, count: int) -> None:
        """What it was given and had not come back for is there for its successor."""
        unread = list(self.model.replies[gateway])
        self._read(gateway, count)
        self.dies(gateway)
        # What was sent together is removed together, so that some of it may come once more.
        stored = self.do(self.keys.replies(gateway))
        assert stored[len(stored) - len(unread) :] == unread
        self.model.replies[gateway] = stored

    @rule(ids=several_ids)
    def cancel(self, ids: list[str]) -> None:
        before = [self._state(run_id) for run_id in ids]
        seen: set[str] = set()
        for number, run_id in enumerate(ids):
            if run_id in seen and before[number] in ("queued", "running"):
                before[number] = "done"
            seen.add(run_id)
        assert self.do(self.by("g0").cancel(ids)) == before
        for run_id in dict.fromkeys(ids):
            if self._state(run_id) in ("queued", "running"):
                self._ended(run_id, "cancelled")

    @rule(ids=several_ids, gateway=gateways)
    def abandon(self, ids: list[str], gateway: str) -> None:
        ids = list(dict.fromkeys(ids))
        before = [self._state(run_id) for run_id in ids]
        assert self.do(self.by(gateway).cancel(ids, abandon_by=gateway)) == before
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
        result = self.do(self.keys.result(run_id))
        assert result is not None
        assert outcome(result) == expected
        self.model.end(run_id, result)

    # Workers

    @rule(worker=workers, count=counts, woken=st.booleans())
    def claim(self, worker: str, count: int, woken: bool) -> None:
        if woken:  # it takes a wake token, which must not be the last while work is left
            self.do(self.by(worker).wait(worker, for_work=True, wait_s=0))
        self._claim(worker, count)

    @rule(worker=workers, count=counts)
    def a_worker_dies_after_its_claim(self, worker: str, count: int) -> None:
        """The server gave runs away, and nobody has heard of it: only their leases end that."""
        delivered = list(self.model.delivered)
        self._claim(worker, count)
        self.model.delivered = delivered
        self.dies(worker)

    def _claim(self, worker: str, count: int) -> int:
        model = self.model
        queued = model.ids("queued")
        on_probation = self._next_on_probation(worker)
        fit = {
            job: [run_id for run_id in model.queued(job) if not model.lives[run_id].overdue]
            for job in JOBS
        }
        available = len(on_probation)
        for job in JOBS:
            room = model.room(job) - [model.lives[one].job for one in on_probation].count(job)
            available += min(len(fit[job]), max(0, room))
        deliveries = self.do(self.by(worker).claim(worker, max_runs=count, lease_s=FOR_EVER_S))
        got = [delivery.run_id for delivery in deliveries]
        assert len(set(got)) == len(got) == min(count, available)
        assert got[: len(on_probation)] == on_probation
        for delivery in deliveries:
            life = model.lives[delivery.run_id]
            life.state, life.owner, life.lapsed = "running", worker, False
            life.attempt += 1
            assert (delivery.attempt, delivery.payload) == (life.attempt, life.payload)
            assert life.attempt - life.base <= MAX_ATTEMPTS
            model.delivered.append(Delivered(worker, delivery.run_id, delivery.attempt))
        for job in JOBS:
            assert model.room(job) >= 0
            self._in_turn([one for one in got if one in fit[job]], fit[job])
        assert all(one in on_probation or one in fit["x"] + fit["y"] for one in got)
        self._overdue_met([run_id for run_id in queued if run_id not in got])
        return len(got)

    def _next_on_probation(self, worker: str) -> list[str]:
        """The one that a worker which holds none is given first, where its job has room."""
        lives = self.model.lives
        waiting = [run_id for run_id in self.model.ids("queued") if lives[run_id].probation]
        if not waiting or self.model.on_trial(worker):
            return []
        first = min(waiting, key=lambda run_id: lives[run_id].turn)
        fit = not lives[first].overdue and self.model.room(lives[first].job) > 0
        return [first] if fit else []

    def _in_turn(self, got: list[str], fit: list[str]) -> None:
        """Within a job, nothing that was left comes before what was taken."""
        taken = [self.model.lives[run_id].turn for run_id in got]
        left = [self.model.lives[run_id].turn for run_id in fit if run_id not in got]
        assert taken == sorted(taken)
        assert not taken or not left or max(taken) < min(left)

    def _overdue_met(self, ids: list[str]) -> None:
        # How many of them a claim meets depends on the turns of the jobs: ask. The order in which
        # it met them is the order of their replies.
        met = [
            run_id
            for run_id in ids
            if self.model.lives[run_id].overdue and self.do(self.keys.state(run_id)) == "done"
        ]
        for run_id in met:
            self._ended(run_id, "expired")
        self._order_of_replies()

    def _order_of_replies(self) -> None:
        """Results that one call made come in the server's order; the model takes it over."""
        for gateway in GATEWAYS:
            expected = self.model.replies[gateway]
            stored = self.do(self.keys.replies(gateway))
            stored = stored[len(stored) - len(expected) :]
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
        assert self.do(self.by(worker).finish(worker, finished)) == expected

    def _finished(self, report: Delivered, result: bytes) -> bool:
        held = self.model.held(report.worker, report.run_id)
        if not held or self.model.lives[report.run_id].attempt != report.attempt:
            return False
        self.model.end(report.run_id, result)
        return True

    @precondition(lambda self: self.model.delivered)
    @rule(data=st.data(), result=st.binary(max_size=8))
    def a_worker_dies_before_it_hears_that_it_finished(
        self, data: st.DataObject, result: bytes
    ) -> None:
        report = data.draw(st.sampled_from(self.model.delivered))
        expected = self._finished(report, result)
        finished = [FinishedRun(report.run_id, report.attempt, result)]
        assert self.do(self.by(report.worker).finish(report.worker, finished)) == [expected]
        self.dies(report.worker)
        # Its successor, or its own retry, says it again.
        assert self.do(self.by(report.worker).finish(report.worker, finished)) == [False]

    @rule(worker=workers, ids=several_ids)
    def renew(self, worker: str, ids: list[str]) -> None:
        self._renew(worker, ids, FOR_EVER_S)

    @rule(worker=workers, ids=several_ids)
    def stay_silent_until_the_lease_ends(self, worker: str, ids: list[str]) -> None:
        self._renew(worker, ids, 0)

    def _renew(self, worker: str, ids: list[str], lease_s: float) -> None:
        lost = [run_id for run_id in ids if not self.model.held(worker, run_id)]
        assert self.do(self.by(worker).renew(worker, ids, lease_s=lease_s)) == lost
        for run_id in ids:
            if run_id not in lost:
                self.model.lives[run_id].lapsed = lease_s == 0

    @rule(worker=workers)
    def a_worker_is_lost(self, worker: str) -> None:
        """With all that it holds, which goes to others or is at its end."""
        self._renew(worker, RUN_IDS, 0)
        self.reap()

    @rule(worker=workers, ids=several_ids)
    def release(self, worker: str, ids: list[str]) -> None:
        held = {run_id for run_id in ids if self.model.held(worker, run_id)}
        assert self.do(self.by(worker).release(worker, ids)) == len(held)
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
                life.probation = life.attempt - life.base == MAX_ATTEMPTS - 1
                model.redelivered += 1
        overdue = [run_id for run_id in model.ids("queued") if model.lives[run_id].overdue]
        touched = self.do(self.by("g0").reap())
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
        notice = self.do(self.by(worker).wait(worker, for_work=False, wait_s=0))
        assert not notice.work
        for run_id in notice.cancelled:
            assert not self.model.held(worker, run_id)

    # The server

    @rule(this_time=st.sampled_from([True, *[False] * 9]))  # or nothing would ever grow old
    def the_server_restarts(self, this_time: bool) -> None:
        """As the embedded one does: with nothing in its memory, scripts neither."""
        if not this_time:
            return
        self.do(self.server.command("FLUSHALL"))
        self.do(self.server.command("SCRIPT", "FLUSH"))
        # Workers still hold runs, and report them.
        self.model = Model(submitted=self.model.submitted, delivered=self.model.delivered)

    # At any time

    @invariant()
    def the_counts_are_right(self) -> None:
        stats = self.do(self.by("g0").stats())
        lives = self.model.lives
        queued = self.model.ids("queued")
        assert stats.queued == len(queued)
        assert stats.leased == len(self.model.ids("running"))
        assert stats.queued_bytes == sum(len(lives[run_id].payload) for run_id in queued)
        assert stats.finished_total == self.model.finished
        assert stats.redelivered_total == self.model.redelivered

    @invariant()
    def the_server_keeps_what_lives_and_nothing_else(self) -> None:
        """A drift that no call shows yet, such as a place under a job's cap that is never free."""
        lives = {run_id: one for run_id, one in self.model.lives.items() if one.state != "done"}
        running = {run_id: one for run_id, one in lives.items() if one.state == "running"}
        counted = {run_id: one.attempt - (run_id in running) for run_id, one in lives.items()}
        jobs = [one.job for one in running.values()]
        kept = self._kept("payloads", "owners", "history", "running", "trials", "deadlines")
        assert set(kept.pop("deadlines")) == {
            run_id
            for run_id, one in lives.items()
            if run_id not in running and DEADLINES[one.turn[1]] is not None
        }
        assert kept == {
            "payloads": {run_id: one.payload for run_id, one in lives.items()},
            "owners": {
                run_id: f"{one.attempt} {one.owner}".encode() for run_id, one in running.items()
            },
            "history": {
                run_id: f"{counted[run_id]} {one.base}".encode()
                for run_id, one in lives.items()
                if counted[run_id]
            },
            "running": {job: str(jobs.count(job)).encode() for job in jobs},
            "trials": {
                one.owner: run_id.encode() for run_id, one in running.items() if one.probation
            },
        }

    def _kept(self, *names: str) -> dict[str, dict[str, bytes]]:
        """In one round trip, for this is asked after every step."""
        keys = [f"{{{self.name}:0}}:{name}" for name in names]
        answers = self.do(
            self.server.block(
                [
                    ("ZRANGE", key, 0, -1, "WITHSCORES")
                    if key.endswith(":deadlines")
                    else ("HGETALL", key)
                    for key in keys
                ],
                wait_s=0,
            )
        )
        kept: dict[str, dict[str, bytes]] = {}
        for name, answer in zip(names, answers, strict=True):
            pairs = cast("list[bytes]", answer)
            kept[name] = {
                key.decode(): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)
            }
        return kept

    @invariant()
    def work_has_a_wake_or_none_is_needed(self) -> None:
        # Nobody waits for work here, so that no token can be on its way to a worker. What is on
        # probation may have to wait for a worker that holds none, or for the next reap.
        if any(self.model.queued(job) and self.model.room(job) > 0 for job in JOBS):
            assert "wake" in self.do(self.keys.all())

    def teardown(self) -> None:
        try:
            self._to_the_end()
        finally:
            for queue in (*self.queues.values(), *self.dead):
                self.do(queue.close())
            self.do(self.server.close())

    def _to_the_end(self) -> None:
        """Finish everything: each waiter gets its result, and nothing is left."""
        for worker in WORKERS:
            self._renew(worker, RUN_IDS, 0)
        self.reap()
        while self.model.ids("queued"):
            self._claim("w0", 3)
            for report in list(self.model.delivered):
                expected = self._finished(report, b"end")
                finished = [FinishedRun(report.run_id, report.attempt, b"end")]
                assert self.do(self.by(report.worker).finish(report.worker, finished)) == [expected]
        assert set(self.model.ids("done")) == set(self.model.lives)
        for gateway in GATEWAYS:
            while self._read(gateway, 5):
                pass
            assert self.model.replies[gateway] == []
        assert self.do(self.keys.lasting()) == set()


@pytest.mark.timeout(600)  # 60 examples of 40 steps; the general limit is for one thing that hangs
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
