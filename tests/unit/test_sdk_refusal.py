"""Reading error answers, of the gateway and of whatever stands in between."""

import json
from collections.abc import AsyncGenerator, Mapping

import pytest

from rollyard import BadRequest, Conflict, Overloaded, Unavailable
from rollyard._refusal import MAX_ERROR_BYTES, Refusal, read_refusal


class Recorded:
    """An answer that was recorded."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for start in range(0, len(self._body), 65536):
            yield self._body[start : start + 65536]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def read(status: int, body: object, **headers: str) -> Refusal:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await read_refusal(Recorded(status, data, named))


async def test_answer_of_the_gateway() -> None:
    body = {"error": "overloaded", "message": "full", "retry_after_s": 0.25, "request_id": "q"}
    refusal = await read(429, body, retry_after="1")
    assert refusal == Refusal(429, "full", 0.25, "q", {}, "overloaded")
    assert str(refusal.error()) == "429: full"


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (429, "overloaded", Overloaded),
        (503, "overloaded", Overloaded),
        (503, "unavailable", Unavailable),
        (503, "", Unavailable),
        (409, "conflict", Conflict),
    ],
)
async def test_full_and_gone_are_told_apart(status: int, said: str, kind: type[Exception]) -> None:
    assert type((await read(status, {"error": said})).error()) is kind


async def test_members_are_found_in_problems() -> None:
    listed = [
        {"field": "runs.3.limits.timeout_s", "message": "too long"},
        {"field": "runs.3.job", "message": "unknown"},
        {"field": "body.runs.0", "message": "wrong"},
        {"field": "runs", "message": "too many"},
        "nonsense",
    ]
    refusal = await read(422, {"message": "malformed", "problems": listed})
    assert set(refusal.problems) == {0, 3}
    assert str(refusal.error(3)) == "422: limits.timeout_s: too long; job: unknown"
    assert str(refusal.error(1)) == "422: malformed"
    assert isinstance(refusal.error(3), BadRequest)


@pytest.mark.parametrize("body", [b"", b"[1]", b"<html>Bad gateway</html>", b"\xff", b'"text"'])
async def test_answer_of_a_proxy(body: bytes) -> None:
    refusal = await read(502, body, retry_after="2", x_request_id="from-header")
    assert isinstance(refusal.error(), Unavailable)
    assert (refusal.retry_after_s, refusal.request_id) == (2.0, "from-header")


@pytest.mark.parametrize("value", [True, -1, "1", None])
async def test_odd_retry_after_in_the_body_is_left_out(value: object) -> None:
    assert (await read(503, {"retry_after_s": value})).retry_after_s is None


async def test_endless_body_is_cut() -> None:
    refusal = await read(500, b"x" * (4 * MAX_ERROR_BYTES))
    assert len(refusal.message) == 500
    assert str((await read(500, b"")).error()) == "HTTP status 500"
