"""Calm cases run side by side, before the first of them is judged."""

import pytest
from cases.mapping import load_cases, not_served, wire
from live_service import Service
from pydantic import ValidationError

from rollyard import RunRequest, RunResult


@pytest.fixture(scope="session")
def calm(service: Service) -> dict[str, RunResult]:
    """Results of all calm cases, by ``<case>.<number>``."""
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
