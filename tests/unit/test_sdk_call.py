"""What a run looks like when it leaves the SDK, and what is refused before."""

import asyncio
import json
from typing import Any

import pytest

from rollyard import AsyncClient, BadRequest, Limits, RunResult
from rollyard._call import Call, Options
from rollyard._encode import Encoder
from rollyard._request import request_of


async def encoded(code: Any, job: str = "j", run_id: Any = None, **options: Any) -> Call:
    loop = asyncio.get_running_loop()
    call = Call(code, loop, job=job, run_id=run_id, options=Options(**options))
    Encoder().encode(call)
    return call


def sent(code: str, **fields: Any) -> dict[str, Any]:
    call = asyncio.run(encoded(code, **fields))
    return json.loads(call.payload_at(call.started))


def silence_s(**fields: Any) -> float:
    return asyncio.run(encoded("", **fields)).silence_s


def test_only_what_is_set_travels() -> None:
    payload = sent("print(1)")
    assert len(payload.pop("run_id")) == 32
    assert payload == {"code": "print(1)", "job": "j"}


def test_everything_set_travels() -> None:
    payload = sent(
        "print(1)",
        stdin="in",
        limits=Limits(timeout_s=10.0),
        files={"a": "text", "b/c": b"\x00\xff"},
        fetch_files=("*",),
        template="bare",
        on_output_limit="stop",
        run_id="mine",
        deadline_s=5,
    )
    assert payload == {
        "run_id": "mine",
        "code": "print(1)",
        "stdin": "in",
        "files": {"a": "text", "b/c": {"base64": "AP8="}},
        "fetch_files": ["*"],
        "limits": {"timeout_s": 10.0},
        "template": "bare",
        "on_output_limit": "stop",
        "job": "j",
        "deadline_s": 5.0,
    }


def test_one_path_may_be_given_as_text() -> None:
    assert sent("", fetch_files="out.txt")["fetch_files"] == ["out.txt"]


def test_silence_is_explained_by_queue_and_run_time() -> None:
    """Case cli-009: 70 s in the queue and 5 s of running are far from the read time-out."""
    assert silence_s(limits={"timeout_s": 5}) >= 70 + 5 + 60
    assert silence_s(limits={"timeout_s": 3600}) > 3600 + 70
    assert silence_s(deadline_s=86400) > 86400 + 10
    assert silence_s(limits={"timeout_s": 5}, deadline_s=10) == 10 + 5 + 60


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"limits": {"timeout_s": 0}}, "limits.timeout_s: "),
        ({"limits": {"timeout_s": float("nan")}}, "limits.timeout_s: "),
        ({"limits": {"timeout": 3}}, "limits.timeout: "),
        ({"files": {"../x": ""}}, "files: "),
        ({"files": {"x": 1}}, "files.x"),
        ({"fetch_files": ["/etc/passwd"]}, "fetch_files: "),
        ({"template": "huge"}, "template: "),
        ({"job": "a b"}, "job: "),
        ({"run_id": ""}, "run_id: "),
        ({"deadline_s": 0}, "deadline_s: "),
        ({"stdin": b"bytes" + b"\xff"}, "stdin: "),
        ({"code": "\ud800"}, ""),
        ({"code": None}, "code: "),
    ],
)
def test_malformed_run_is_refused_here_and_the_field_named(
    wrong: dict[str, Any], field: str
) -> None:
    fields: dict[str, Any] = {"code": "", "job": "j", **wrong}
    with pytest.raises(BadRequest) as caught:
        asyncio.run(encoded(**fields))
    assert str(caught.value).startswith(field)
    assert caught.value.status == 422
    with pytest.raises(BadRequest) as caught:
        request_of(fields, job="j", index=12)
    assert str(caught.value).startswith(f"runs.12.{field}")


async def test_malformed_timeout_is_refused() -> None:
    client = AsyncClient()
    for wrong in (0, -1, float("nan")):
        with pytest.raises(BadRequest, match="timeout_s"):
            await client.run("", timeout_s=wrong)


def test_returned_files_are_decoded() -> None:
    line = '{"run_id":"r","outcome":"ok","files":{"a":"\\u00e9","b":{"base64":"AP8="}}}'
    result = RunResult.model_validate_json(line)
    assert result.file_bytes("a") == "é".encode()
    assert result.file_bytes("b") == b"\x00\xff"
    with pytest.raises(KeyError):
        result.file_bytes("c")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
