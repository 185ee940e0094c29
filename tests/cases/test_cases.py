"""Every case of ``data/`` that Rollyard serves, against a real service."""

import time
import uuid
from typing import Any

import pytest
from aftermath import Before, faults
from cases.evaluate import check, relation
from cases.mapping import Case, gateway_body, load_cases, not_served, observe, wire
from cases.test_faults import CLIENT, FAULTS
from cases.test_scenarios import SCENARIOS
from live_service import Service, post, post_json
from pydantic import ValidationError

from rollyard import RunRequest, RunResult

CASES = load_cases()
NOT_SERVED = not_served()
NOT_SERVED_MAX = 99
"""Lower it with each case that gets served; it never rises."""
ANSWER_SLACK_S = 5.0
PATHS = {"/run": "/v1/runs"}

SERVED = [case for case in CASES.values() if case.id not in NOT_SERVED]
RUNS = [case.id for case in SERVED if case.endpoint in ("run", "batch") and not case.is_serial]
SERIAL = [case.id for case in SERVED if case.endpoint == "batch" and case.is_serial]
REQUESTS = [case.id for case in SERVED if case.endpoint == "gateway" and "path" in case.request]

Observed = list[dict[str, Any]]


def test_every_case_is_served_or_listed() -> None:
    assert set(NOT_SERVED) <= CASES.keys()
    told = [*SCENARIOS, *FAULTS, *CLIENT]
    assert sorted([*RUNS, *SERIAL, *REQUESTS, *told, *NOT_SERVED]) == sorted(CASES)
    assert len(NOT_SERVED) <= NOT_SERVED_MAX


@pytest.mark.parametrize("case_id", RUNS)
def test_run(case_id: str, service: Service, request: pytest.FixtureRequest) -> None:
    case = CASES[case_id]
    requests = _requests(case)
    if requests is None:
        assert differences(case, _sent_by_hand(service, case)) == []
    elif case.is_calm:
        calm: dict[str, RunResult] = request.getfixturevalue("calm")
        seen = [
            observe(run, calm[f"{case_id}.{number}"], None) for number, run in enumerate(case.runs)
        ]
        before = Before.of(service)
        assert differences(case, seen) + faults(before, case.after) == []
    else:
        before = Before.of(service)
        seen = _alone(service, case, requests)
        assert differences(case, seen) + faults(before, case.after) == []


@pytest.mark.parametrize("case_id", SERIAL)
def test_one_after_another_on_one_slot(case_id: str, one_slot: Service) -> None:
    case = CASES[case_id]
    requests = _requests(case)
    assert requests is not None
    before = Before.of(one_slot)
    seen: Observed = []
    workers: set[str] = set()
    for run, one in zip(case.runs, requests, strict=True):
        began = time.monotonic()
        result = one_slot.client.submit(one)
        seen.append(observe(run, result, time.monotonic() - began))
        workers.add(result.worker_id)
    assert len(workers) == 1
    assert differences(case, seen) + faults(before, case.after) == []


@pytest.mark.parametrize("case_id", REQUESTS)
def test_request(case_id: str, service: Service) -> None:
    case = CASES[case_id]
    body = gateway_body(case.request)
    before = Before.of(service)
    began = time.monotonic()
    path = PATHS[case.request["path"]]
    status, text = post(service, path, body, **case.request.get("headers", {}))
    seen: dict[str, Any] = {"http_status": status, "body": text}
    seen["wall_s"] = time.monotonic() - began
    if status == 200:
        seen |= observe({}, RunResult.model_validate_json(text), seen["wall_s"])
    assert status < 500
    assert check(case.expect, seen) + faults(before, case.after) == []


def _requests(case: Case) -> list[RunRequest] | None:
    """The case's runs, or None when our own types refuse one of them."""
    mark = uuid.uuid4().hex[:8]  # a second try is a second run
    suffix = "" if case.is_calm else f".{mark}"
    try:
        return [
            RunRequest(**wire(run, f"{case.id}.{number}{suffix}"))
            for number, run in enumerate(case.runs)
        ]
    except ValidationError:
        return None


def _alone(service: Service, case: Case, requests: list[RunRequest]) -> Observed:
    began = time.monotonic()
    ordered = "order_preserved" in case.expect
    results: dict[str, tuple[RunResult, float]] = {}
    for result in service.client.run_batch(requests, ordered=ordered):
        assert result.run_id not in results
        results[result.run_id] = result, time.monotonic() - began
    if ordered:
        assert list(results) == [one.run_id for one in requests]
    seen: Observed = []
    for run, one in zip(case.runs, requests, strict=True):
        result, wall_s = results[one.run_id or ""]
        seen.append(observe(run, result, wall_s))
        if len(requests) == 1:
            assert seen[0]["wall_s"] <= one.limits.timeout_s + ANSWER_SLACK_S
    return seen


def _sent_by_hand(service: Service, case: Case) -> Observed:
    """Past the SDK's own checks: what the gateway says to a malformed request."""
    bodies = [wire(run, f"{case.id}.{number}") for number, run in enumerate(case.runs)]
    if case.endpoint == "run":
        status, text = post_json(service, "/v1/runs", bodies[0])
    else:
        status, text = post_json(service, "/v1/batches", {"runs": bodies})
    assert status == 422, text
    return [{"http_status": status, "status": "rejected", "body": text}]


def differences(case: Case, seen: Observed) -> list[str]:
    """What of a case's expectations does not hold; ``infra`` fails where it is not listed."""
    found = _compare(case.expect, seen)
    expected = case.expect.get("items", [case.expect] * len(seen))
    for want, got in zip(expected, seen, strict=False):
        if got["status"] == "infra" and "infra" not in want.get("status_in", []):
            found.append(f"a fault of ours: {got}")
    return [f"{text}\n    seen: {seen}" for text in found[:1]] + found[1:]


def _compare(expect: dict[str, Any], seen: Observed) -> list[str]:
    found: list[str] = []
    if "any_of" in expect:
        tries = [_compare(one, seen) for one in expect["any_of"]]
        if all(tries):
            found.append("none of the alternatives: " + " | ".join("; ".join(t) for t in tries))
    own = {name: want for name, want in expect.items() if name not in ("any_of", "items_each")}
    if "items" in expect:
        if len(expect["items"]) != len(seen):
            return [f"{len(seen)} answers for {len(expect['items'])} items"]
        for number, (want, got) in enumerate(zip(expect["items"], seen, strict=True)):
            found += [f"item {number}: {text}" for text in check(want, got)]
    elif "count" not in expect:
        found += check(own, seen[0])
    if "count" in expect and len(seen) != expect["count"]:
        found.append(f"{len(seen)} answers, wanted {expect['count']}")
    if "relation" in expect:
        found += relation(expect["relation"], seen)
    return found + _each(expect.get("items_each"), seen)


def _each(want: dict[str, Any] | None, seen: Observed) -> list[str]:
    if want is None:
        return []
    found: list[str] = []
    plain = {name: value for name, value in want.items() if name != "stdout_equals_expr"}
    for i, got in enumerate(seen):
        found += [f"item {i}: {text}" for text in check(plain, got)]
        if "stdout_equals_expr" in want:
            value = eval(want["stdout_equals_expr"], {"i": i})
            if got["stdout"] != f"{value}\n":
                found.append(f"item {i}: stdout {got['stdout']!r}, wanted {value}")
    return found
