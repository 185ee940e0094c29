"""Parts of the service are killed while runs are under way: all are answered, none is blamed."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from live_service import Service, serve
from process_tree import until
from programs import running
from requirements import requirement

from rollyard import RunResult

COUNT = 4
ANSWERED_S = 15.0
PROGRAMS = [f"import time\ntime.sleep(1.5)\nprint('done {i}')" for i in range(COUNT)]


@pytest.fixture(scope="module")
def mortal(placed: None) -> Iterator[Service]:
    """A service of its own, whose lost runs come back within a few seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLYARD_LEASE_S", "2")
        with serve("doomed", slots=COUNT, templates=("bare",)) as started:
            yield started


@pytest.fixture
def doomed(mortal: Service) -> Service:
    """That service, recovered from the test before."""
    assert until(lambda: mortal.worker_pid != 0)
    assert _served(mortal)
    return mortal


def _slots(service: Service) -> list[int]:
    return [one.pid for one in service.family().slots]


def _one_slot(service: Service) -> list[int]:
    return _slots(service)[:1]


def _templates(service: Service) -> list[int]:
    return [one.pid for one in service.family().templates]


def _jails(service: Service) -> list[int]:
    return sorted({one.parent for one in service.family().templates})


def _worker(service: Service) -> list[int]:
    return [service.worker_pid]


def _programs(service: Service) -> list[int]:
    return [one.pid for one in service.family().programs]


def _kill(pids: list[int]) -> None:
    assert pids and all(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@requirement("fault.not_the_models", "fault.one_answer")
@pytest.mark.parametrize("victims", [_one_slot, _slots, _templates, _jails, _worker])
def test_a_killed_part_is_never_the_programs_fault(
    doomed: Service, victims: Callable[[Service], list[int]]
) -> None:
    began = time.monotonic()
    with running(doomed, *PROGRAMS) as runs:
        _kill(victims(doomed))
        results = [one.result(timeout=60) for one in runs]
    assert time.monotonic() - began < ANSWERED_S
    for number, result in enumerate(results):
        assert result.outcome in ("ok", "infra_error"), result
        if result.outcome == "ok":
            assert result.stdout == f"done {number}\n"
        else:
            assert result.message
    assert until(lambda: _served(doomed), timeout_s=20)
    assert until(lambda: not doomed.unfinished_keys())
    assert until(lambda: not doomed.family().programs)


@requirement("fault.not_the_models", "fault.one_answer")
def test_a_killed_slot_costs_a_second_try_only(doomed: Service) -> None:
    with running(doomed, *PROGRAMS) as runs:
        _kill(_slots(doomed))
        assert [one.result(timeout=60).outcome for one in runs] == ["ok"] * COUNT


@requirement("fault.not_the_models", "fault.one_answer")
def test_a_killed_worker_loses_nothing(doomed: Service) -> None:
    with running(doomed, *PROGRAMS) as runs:
        before = doomed.worker_pid
        _kill(_worker(doomed))
        results = [one.result(timeout=60) for one in runs]
    assert [(one.outcome, one.attempt) for one in results] == [("ok", 2)] * COUNT
    assert doomed.worker_pid not in (0, before)


@requirement("fault.one_answer")
def test_a_program_killed_from_outside_is_a_signal_and_no_second_try(doomed: Service) -> None:
    """The machine's own out-of-memory killer does this; nobody could tell it from kill(2)."""
    with running(doomed, *PROGRAMS) as runs:
        _kill(_programs(doomed))
        results = [one.result(timeout=60) for one in runs]
    assert [(one.outcome, one.signal) for one in results] == [("signal", 9)] * COUNT


@requirement("fault.not_the_models", "fault.one_answer")
def test_a_stopped_worker_that_wakes_late_answers_nothing_twice(doomed: Service) -> None:
    with running(doomed, PROGRAMS[0]) as runs:
        worker = doomed.worker_pid
        os.kill(worker, signal.SIGSTOP)
        try:
            assert until(lambda: doomed.client.stats()["leased"] == 1)
            # Its lease ends meanwhile; nobody else serves, so it gets the run again itself.
            assert until(lambda: _lease_is_over(doomed), timeout_s=20)
        finally:
            os.kill(worker, signal.SIGCONT)
        result = runs[0].result(timeout=60)
    assert (result.outcome, result.stdout) == ("ok", "done 0\n")
    assert until(lambda: not doomed.unfinished_keys())


@requirement("fault.one_answer")
def test_a_worker_that_is_asked_to_stop_finishes_what_runs(doomed: Service) -> None:
    with running(doomed, *PROGRAMS) as runs:
        os.kill(doomed.worker_pid, signal.SIGTERM)
        results: list[RunResult] = [one.result(timeout=60) for one in runs]
    assert [(one.outcome, one.attempt) for one in results] == [("ok", 1)] * COUNT


def _served(service: Service) -> bool:
    return service.client.run("print(1)").stdout == "1\n"


def _lease_is_over(service: Service) -> bool:
    with service.valkey() as server:
        seconds, micros = server.time()  # pyright: ignore[reportUnknownMemberType]
        now_us = seconds * 1_000_000 + micros
        return not server.zcount("{rollyard:0}:leases", now_us, "+inf")
