"""What chaos lets pass and what not: its schedule, its programs, its verdict."""

from collections import Counter
from itertools import islice, pairwise
from typing import get_args

import pytest

from rollyard import RunResult
from rollyard_loadtest.chaos_faults import KINDS, Done, FaultKind, draw_faults
from rollyard_loadtest.chaos_load import Entry, Ledger, chaos_jobs
from rollyard_loadtest.chaos_report import Report, text

LOST_THREE = "3 workers were lost while it ran; not tried again"


def entry(**fields: object) -> Entry:
    given: dict[str, object] = {
        "run_id": "r", "kind": "small", "way": "call", "asked_s": 1.0, "first_asked_s": 1.0,
        "answered_s": 9.0,
        "outcome": "ok", "attempt": 1,
    }  # fmt: skip
    return Entry(**(given | fields))  # pyright: ignore[reportArgumentType]


def report(*entries: Entry, faults: tuple[Done, ...] = (), **fields: object) -> Report:
    made = Report({}, 10.0, Ledger(entries=list(entries)), list(faults))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def kills(count: int, *, from_s: float = 2.0) -> tuple[Done, ...]:
    return tuple(
        Done("kill worker", "worker-0", from_s + n, from_s + n + 0.5) for n in range(count)
    )


def test_a_schedule_is_the_seeds_and_has_every_kind() -> None:
    drawn = draw_faults(until_s=300, every_s=4, lease_s=5, seed=7)
    assert drawn == draw_faults(until_s=300, every_s=4, lease_s=5, seed=7)
    assert drawn != draw_faults(until_s=300, every_s=4, lease_s=5, seed=8)
    once = len(KINDS)
    assert {fault.kind for fault in drawn[:once]} == set(get_args(FaultKind))
    counted = Counter(fault.kind for fault in drawn[: sum(KINDS.values())])
    assert counted == KINDS
    assert all(0 < a.at_s < b.at_s < 300 for a, b in pairwise(drawn))


def test_a_frozen_worker_passes_its_lease_and_a_paused_one_does_not() -> None:
    drawn = draw_faults(until_s=600, every_s=2, lease_s=5, seed=1)
    frozen = [fault.for_s for fault in drawn if fault.kind == "freeze worker"]
    paused = [fault.for_s for fault in drawn if fault.kind == "pause worker"]
    assert frozen and min(frozen) > 5
    assert paused and max(paused) < 5


def test_programs_are_the_seeds_and_know_their_answers() -> None:
    jobs = list(islice(chaos_jobs(5, lease_s=4, science=False), 800))
    again = list(islice(chaos_jobs(5, lease_s=4, science=False), 800))
    assert [job.request for job in jobs] == [job.request for job in again]
    kinds = {job.kind for job in jobs}
    assert {"small", "outlasts a lease", "deadline", "cancelled"} <= kinds
    assert not kinds & {"numpy", "sympy"}
    [long, *_] = [job for job in jobs if job.kind == "outlasts a lease"]
    assert long.check(RunResult(run_id="r", outcome="cancelled")) != ""
    assert long.check(RunResult(run_id="r", outcome="ok", stdout="else\n")) != ""


def test_all_well_is_no_problem() -> None:
    made = report(entry(), entry(run_id="s", attempt=2), faults=kills(1))
    assert made.problems() == []
    assert made.counts()["delivered_again"] == 1
    assert "| 0 | 0 | 0 | 0, 0 | 0 |" in text(made)


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (report(entry(answered_s=None)), "LOST"),
        (report(entry(problem="stdout is 'x'")), "WRONG"),
        (report(entry(), left=["key load"]), "LEFT"),
        (report(entry(), tracebacks=["gateway-0: …"]), "LOGGED"),
        (report(entry(), stopped_badly=["worker-1"]), "STOPPED BADLY"),
        (report(entry(), not_recovered="gateway-0 is not ready"), "NOT RECOVERED"),
        (Report({}, 10.0, Ledger(duplicated=["r has two results"]), []), "DUPLICATED"),
    ],
)
def test_each_fault_is_a_problem(made: Report, word: str) -> None:
    [problem] = made.problems()
    assert problem.startswith(word)
    assert problem in text(made)


def infra(**fields: object) -> Entry:
    return entry(outcome="infra_error", message=LOST_THREE, attempt=3, **fields)


def test_infra_error_is_explained_by_three_lost_workers() -> None:
    made = report(infra(), faults=kills(3))
    assert made.problems() == []
    assert made.counts()["infra_error"] == 1


@pytest.mark.parametrize(
    "made",
    [
        report(infra(), faults=kills(2)),
        report(infra(), faults=kills(3, from_s=9.5)),  # after its answer
        report(infra(), faults=tuple(Done("kill gateway", "gateway-0", n, n) for n in (2, 3, 4))),
        report(entry(outcome="infra_error", message="worker fault: …", attempt=3), faults=kills(3)),
    ],
)
def test_infra_error_without_three_losses_is_a_problem(made: Report) -> None:
    [problem] = made.problems()
    assert problem.startswith("UNEXPLAINED")
