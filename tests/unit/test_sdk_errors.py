"""Errors cross processes, and carry what they know."""

import copy
import pickle  # noqa: TID251 - that errors can be pickled is a promise

import pytest

from rollyard import (
    BadRequest,
    DeadlineExceeded,
    Overloaded,
    PayloadTooLarge,
    RollyardError,
    RunFailed,
    RunResult,
    TransportError,
    Unauthorized,
    Unavailable,
)

EXAMPLES: list[RollyardError] = [
    TransportError("m", run_id="r"),
    DeadlineExceeded("m", run_id="r"),
    BadRequest("m", status=422),
    Unauthorized("m", status=401),
    PayloadTooLarge("m", status=413),
    Overloaded("m", status=429, retry_after_s=1.5, request_id="q"),
    Unavailable("m", status=503),
    RunFailed(RunResult(run_id="r", outcome="error", stderr="Traceback\nValueError: x\n")),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_and_copying(error: RollyardError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__


def test_errors_are_what_python_calls_them() -> None:
    assert issubclass(DeadlineExceeded, TimeoutError)
    assert issubclass(TransportError, ConnectionError)
    assert issubclass(BadRequest, ValueError)
    assert issubclass(Unauthorized, PermissionError)


def test_raise_for_outcome() -> None:
    fine = RunResult(run_id="r", outcome="ok")
    assert fine.raise_for_outcome() is fine
    failed = RunResult(run_id="r", outcome="error", stderr="Traceback\nValueError: x\n")
    with pytest.raises(RunFailed, match="run r ended with error: ValueError: x") as caught:
        failed.raise_for_outcome()
    assert caught.value.result is failed
