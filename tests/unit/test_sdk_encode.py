"""The quick way of writing a run, against the long one."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import BadRequest, Limits, RunRequest
from rollyard._call import PLAIN, Call, Options
from rollyard._encode import KEPT, Encoder
from rollyard._request import make_request

TEXT = st.text(max_size=40)
NAMES = ["timeout_s", "memory_bytes", "pids", "cpu_s", "nonsense"]
VALUES = st.one_of(
    st.integers(-1, 1 << 41), st.floats(allow_nan=True), st.booleans(), st.none(), st.just([])
)
LIMITS = st.one_of(
    st.none(),
    st.builds(Limits, timeout_s=st.floats(0.1, 10), pids=st.integers(1, 9)),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    st.just(5),
)
OPTIONS = st.builds(
    Options,
    stdin=st.one_of(st.none(), TEXT, st.just(5)),
    limits=LIMITS,
    files=st.one_of(st.none(), st.just({"a": "x", "b": b"\xff"}), st.just({"../a": ""})),
    fetch_files=st.sampled_from([(), ["*"], "out.txt"]),
    template=st.sampled_from(["auto", "bare", "huge", []]),
    language=st.sampled_from(["python", "bash", "cobol"]),
    echo_last=st.booleans(),
    priority=st.sampled_from([0, 1, -100, 101, True, 1.0, 0.5, "1", [], None]),
    deadline_s=st.one_of(st.none(), st.integers(-1, 90_000), st.floats(), st.booleans()),
)


def outcome(make: Any) -> dict[str, Any] | str:
    try:
        return make()
    except BadRequest as error:
        return str(error)


def written(encoder: Encoder, loop: asyncio.AbstractEventLoop, *fields: Any) -> dict[str, Any]:
    code, job, run_id, options = fields
    call = Call(code, loop, job=job, run_id=run_id, options=options)
    encoder.encode(call)
    sent = json.loads(call.payload_at(call.started))
    if run_id is None:
        del sent["run_id"]
    assert call.timeout_s == make_request(code, job=job, options=options).limits.timeout_s
    return sent


def long_way(code: Any, job: Any, run_id: Any, options: Options) -> dict[str, Any]:
    request = make_request(code, job=job, run_id=run_id, options=options)
    return json.loads(request.model_dump_json(exclude_unset=True))


@settings(max_examples=400, deadline=None)
@given(
    code=st.one_of(TEXT, st.text(st.characters(), max_size=5), st.just(1)),
    job=st.sampled_from(["default", "a b", "team/x"]),
    run_id=st.sampled_from([None, "mine", "", "x\n", "a b"]),
    options=st.one_of(st.just(PLAIN), OPTIONS),
)
def test_both_ways_say_the_same(code: Any, job: str, run_id: str | None, options: Options) -> None:
    loop, encoder = asyncio.new_event_loop(), Encoder()
    try:
        expected = outcome(lambda: long_way(code, job, run_id, options))
        for _ in range(2):  # the second time from memory
            got = outcome(lambda: written(encoder, loop, code, job, run_id, options))
            assert got == expected
    finally:
        loop.close()


async def test_what_is_kept_is_bounded() -> None:
    loop, encoder = asyncio.get_running_loop(), Encoder()
    for number in range(3 * KEPT):
        encoder.encode(Call("", loop, job=f"job-{number}"))
    kept: dict[object, object] = vars(encoder)["_shapes"]
    assert 0 < len(kept) <= KEPT


async def test_code_that_does_not_fit_its_disk_is_refused() -> None:
    loop, encoder = asyncio.get_running_loop(), Encoder()
    options = Options(limits={"disk_bytes": 1 << 20})
    encoder.encode(Call("é" * (1 << 18), loop, options=options))
    with pytest.raises(BadRequest, match="disk_bytes"):
        encoder.encode(Call("é" * ((1 << 19) + 1), loop, options=options))


async def test_request_travels_as_it_is() -> None:
    loop = asyncio.get_running_loop()
    request = RunRequest(code="\u2028", job="j", deadline_s=3)
    call = Call(request, loop, job="other", options=Options(stdin="not looked at"))
    Encoder().encode(call)
    sent = json.loads(call.payload_at(call.started + 1))
    assert sent == {"run_id": call.run_id, "code": "\u2028", "job": "j", "deadline_s": 2.0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
