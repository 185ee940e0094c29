"""The retry table."""

import pytest

from rollyard import errors
from rollyard._retry import (
    RetryPolicy,
    TransportFault,
    error_class,
    final_error,
    is_retried,
    parse_retry_after,
    retry_after_s,
)


def status_error(status: int, **fields: object) -> errors.StatusError:
    return error_class(status)("no", status=status, request_id="r", **fields)


@pytest.mark.parametrize(
    ("status", "kind", "again"),
    [
        (301, errors.BadRequest, False),
        (400, errors.BadRequest, False),
        (401, errors.Unauthorized, False),
        (403, errors.Unauthorized, False),
        (404, errors.BadRequest, False),
        (409, errors.Conflict, False),
        (408, errors.Unavailable, True),
        (413, errors.PayloadTooLarge, False),
        (422, errors.BadRequest, False),
        (429, errors.Overloaded, True),
        (500, errors.Unavailable, False),
        (501, errors.Unavailable, False),
        (502, errors.Unavailable, True),
        (503, errors.Unavailable, True),
        (504, errors.Unavailable, True),
    ],
)
def test_table(status: int, kind: type[errors.StatusError], again: bool) -> None:
    error = status_error(status)
    assert type(error) is kind
    assert is_retried(error) is again


def test_faults_of_transport() -> None:
    assert is_retried(TransportFault("reset"))
    assert not is_retried(TransportFault("malformed header", retry=False))
    assert not is_retried(errors.TransportError("closed"))


def test_backoff_doubles_to_eight_seconds_and_is_jittered() -> None:
    low = RetryPolicy(uniform=lambda a, b: a)
    high = RetryPolicy(uniform=lambda a, b: b)
    assert [high.delay_s(n) for n in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0]
    assert [low.delay_s(n) for n in range(2)] == [0.05, 0.1]
    assert high.delay_s(10_000) == 8.0


def test_retry_after_is_honoured_within_a_bound() -> None:
    low = RetryPolicy(uniform=lambda a, b: a)
    high = RetryPolicy(uniform=lambda a, b: b)
    assert low.delay_s(0, 5.0) == 5.0
    assert high.delay_s(0, 4.0) == 5.0
    assert low.delay_s(0, 3600.0) == 60.0
    assert high.delay_s(7, 0.0) == 8.0
    assert low.delay_s(0, -1.0) == 0.05


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": " 0.5 "}, 0.5),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Mon, 30 Nov 2026 10:00:07 GMT"}, None),
        (
            {
                "retry-after": "Mon, 30 Nov 2026 10:00:07 GMT",
                "date": "Mon, 30 Nov 2026 10:00:00 GMT",
            },
            7.0,
        ),
        (
            {
                "retry-after": "Mon, 30 Nov 2026 10:00:00 GMT",
                "date": "Mon, 30 Nov 2026 10:00:07 GMT",
            },
            0.0,
        ),
        (
            {"retry-after": "Mon, 30 Nov 2026 10:00:00 GMT", "date": "Mon, 30 Nov 2026 10:00:00"},
            None,
        ),
    ],
)
def test_retry_after_header(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers) == seconds


def test_final_error() -> None:
    fault = final_error(TransportFault("reset"), tries=1)
    assert type(fault) is errors.TransportError
    assert str(fault) == "reset"
    assert isinstance(fault, ConnectionError)
    last = final_error(status_error(429, retry_after_s=2.0), tries=9)
    assert isinstance(last, errors.Overloaded)
    assert str(last) == "no (after 9 tries)"
    assert (last.status, last.request_id, last.retry_after_s) == (429, "r", 2.0)
    assert retry_after_s(last) == 2.0
    closed = errors.TransportError("closed")
    assert final_error(closed, tries=3) is closed
    assert retry_after_s(closed) is None
