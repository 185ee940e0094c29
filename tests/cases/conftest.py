"""One service for all cases, and one with a single slot for those that come after each other."""

from collections.abc import Iterator

import pytest
from cases.mapping import load_cases, not_served, wire
from live_service import Service, canaries, serve
from pydantic import ValidationError

from rollyard import RunRequest, RunResult

SLOTS = 32


@pytest.fixture(scope="session")
def placed() -> Iterator[None]:
    with canaries():
        yield


@pytest.fixture(scope="session")
def service(placed: None) -> Iterator[Service]:
    with serve("cases", slots=SLOTS) as started:
        yield started


@pytest.fixture(scope="session")
def one_slot(placed: None) -> Iterator[Service]:
    with serve("serial", slots=1) as started:
        yield started


@pytest.fixture(scope="session")
def calm(service: Service) -> dict[str, RunResult]:
    """Results of all calm cases, which ran side by side; by ``<case>.<number>``."""
    requests: list[RunRequest] = []
    skipped = not_served()
    for case in load_cases().values():
        if case.id in skipped or case.endpoint not in ("run", "batch") or not case.is_calm:
            continue
        for number, run in enumerate(case.runs):
            try:
                requests.append(RunRequest(**wire(run, f"{case.id}.{number}")))
            except ValidationError:  # its test sends it by hand
                break
    results = {result.run_id: result for result in service.client.run_batch(requests)}
    assert len(results) == len(requests)
    return results
