"""E2B's ``/execute``: the events of one cell."""

import json
from typing import Any

import httpx2
import pytest

Json = dict[str, Any]


def execute(http: httpx2.Client, code: str, **fields: object) -> list[Json]:
    answer = http.post("/execute", json={"code": code, **fields})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line) for line in answer.text.splitlines()]
    assert events[0] == {"type": "number_of_executions", "execution_count": 1}
    assert events[-1] == {"type": "end_of_execution"}
    return events[1:-1]


def test_output_and_value(http: httpx2.Client) -> None:
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\ndisplay(1)\n2 + 2"
    out, err, shown, value = execute(http, code, language="python")
    assert (out["type"], out["text"]) == ("stdout", "out\n")
    assert isinstance(out["timestamp"], int)
    assert (err["type"], err["text"]) == ("stderr", "err\n")
    assert shown == {"type": "result", "is_main_result": False, "text": "1"}
    assert value == {"type": "result", "is_main_result": True, "text": "4"}


def test_error(http: httpx2.Client) -> None:
    [error] = execute(http, "x = 1\nx / 0")
    assert (error["type"], error["name"]) == ("error", "ZeroDivisionError")
    assert error["value"] == "division by zero"
    assert 'File "<cell 1>", line 2, in <module>\n    x / 0' in error["traceback"]


def test_environment_is_of_one_call(http: httpx2.Client) -> None:
    code = "import os\nos.environ.get('MINE')"
    [value] = execute(http, code, env_vars={"MINE": "yes"})
    assert value["text"] == "'yes'"
    assert execute(http, code) == []


def test_an_interpreter_that_ends_early(http: httpx2.Client) -> None:
    out, error = execute(http, "print('x', flush=True)\nimport os\nos._exit(3)")
    assert out["text"] == "x\n"
    assert (error["name"], error["value"]) == ("SystemExit", "exit code 3")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/contexts"),
        ("GET", "/contexts"),
        ("POST", "/contexts/c/restart"),
        ("DELETE", "/contexts/c"),
    ],
)
def test_contexts_need_sessions(http: httpx2.Client, method: str, path: str) -> None:
    answer = http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 501
    assert "need sessions" in answer.json()["message"]


def test_contexts_and_other_languages_are_refused(http: httpx2.Client) -> None:
    answer = http.post("/execute", json={"code": "1", "context_id": "c"})
    assert answer.status_code == 404
    assert "'c' not found: this server has no contexts" in answer.json()["message"]
    assert http.post("/execute", json={"code": "1", "language": "js"}).status_code == 422
    assert execute(http, "1", language="python3")[0]["text"] == "1"
    assert http.post("/execute", json={"code": 1}).status_code == 422


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import os; os.kill(os.getpid(), 11)", "SignalError"),
        ("b = bytearray(3 << 30)\nb[::4096] = bytes(len(b[::4096]))", "MemoryError"),
    ],
)
def test_an_interpreter_that_is_ended(http: httpx2.Client, code: str, name: str) -> None:
    out, error = execute(http, f"print('kept', flush=True)\n{code}")
    assert (out["text"], error["name"]) == ("kept\n", name)
