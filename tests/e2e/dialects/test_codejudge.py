"""code-judge's routes, by a client as rStar2's and by hand; its known faults are not here."""

import asyncio
from typing import Any

import httpx2
import pytest

from .conftest import Gateway
from .rollout_client import RolloutClient

Json = dict[str, Any]


def submit(http: httpx2.Client, path: str, **submission: object) -> Json:
    answer = http.post(path, json={"type": "python", **submission})
    assert answer.status_code == 200, answer.text
    return answer.json()


def batch(http: httpx2.Client, path: str, submissions: list[Json]) -> list[Json]:
    answer = http.post(path, json={"type": "batch", "submissions": submissions})
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def python(solution: str, **fields: object) -> Json:
    return {"type": "python", "solution": solution, **fields}


def test_a_rollout_of_many_calls(endpoint: str) -> None:
    client = RolloutClient(endpoint)
    results = asyncio.run(client.run([python(f"print({i} ** 2)") for i in range(200)]))
    assert [result and result["stdout"] for result in results] == [f"{i**2}\n" for i in range(200)]
    assert sorted(client.requests) == [8, 32, 32, 32, 32, 32, 32]  # nothing was sent twice


def test_result_has_exactly_its_fields(http: httpx2.Client) -> None:
    result = submit(http, "/run", sub_id="mine", solution="print(1)")
    assert 0 <= result.pop("cost") < 5
    assert result == {
        "sub_id": "mine", "success": True, "run_success": True, "stdout": "1\n", "stderr": "",
        "reason": "",
    }  # fmt: skip
    judged = submit(http, "/judge", solution="print(1)")
    assert judged.keys() == {"sub_id", "success", "run_success", "cost", "reason"}
    assert len(judged["sub_id"]) == 36


@pytest.mark.parametrize(
    ("printed", "expected", "success"),
    [
        ("1 2\\n", "1 2", True),
        ("\\n 1 2 \\n\\n", "1 2\n", True),
        ("1  2", "1 2", False),
        ("1.0", "1", False),
        ("", "", True),
    ],
)
def test_comparison_is_of_the_whole_stripped_output(
    http: httpx2.Client, printed: str, expected: str, success: bool
) -> None:
    solution = f"print('{printed}', end='')"
    result = submit(http, "/judge", solution=solution, expected_output=expected)
    assert (result["success"], result["run_success"]) == (success, True)


def test_output_is_cut_to_1000_characters_and_compared_whole(http: httpx2.Client) -> None:
    long = "\N{SNOWMAN}" * 600_000
    solution = "import sys; sys.stdout.write(chr(0x2603) * 600_000)"
    result = submit(http, "/run", solution=solution, expected_output=long)
    assert result["success"]
    assert result["stdout"] == long[:1000]
    assert not submit(http, "/run", solution=solution, expected_output=long + "x")["success"]


def test_what_cannot_be_compared_is_not_judged(http: httpx2.Client) -> None:
    result = submit(http, "/run", solution="print(1)", expected_output="x" * 5_000_000)
    assert (result["success"], result["reason"]) == (False, "invalid_input")


def test_a_program_that_fails(http: httpx2.Client) -> None:
    result = submit(http, "/run", solution="\n\nraise KeyError('k')", expected_output="")
    assert (result["success"], result["run_success"], result["reason"]) == (False, False, "")
    assert "line 3, in <module>" in result["stderr"]
    assert not submit(http, "/run", solution="exit(2)")["run_success"]


def test_time_limit(gateway: Gateway) -> None:
    with gateway(max_timeout_s=0.7) as address, httpx2.Client(base_url=address) as http:
        [late, quick] = batch(
            http, "/run/batch", [python("print('p')\nwhile True: pass"), python("print('q')")]
        )
    assert (late["run_success"], late["reason"]) == (False, "worker_timeout")
    assert late["stdout"] == "p\n\nSuicide from timeout."
    assert late["cost"] >= 0.7
    assert quick["success"]


@pytest.mark.parametrize("given", [None, ""])
def test_empty_input_is_end_of_file(http: httpx2.Client, given: str | None) -> None:
    result = submit(http, "/run", solution="input()", input=given)
    assert result["stderr"].endswith("EOFError: EOF when reading a line\n")


@pytest.mark.parametrize(
    ("solution", "stdout"),
    [
        ("from __future__ import annotations\nprint(1)", "1\n"),
        ("print('@@E 0.1 @@E')", "@@E 0.1 @@E\n"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "\N{REPLACEMENT CHARACTER}"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); print(1)", "1\n"),
        ("import os; print([n for n in os.environ if 'REDIS' in n])", "[]\n"),
    ],
)
def test_known_faults_are_not_copied(http: httpx2.Client, solution: str, stdout: str) -> None:
    result = submit(http, "/run", solution=solution)
    assert (result["run_success"], result["stdout"], result["reason"]) == (True, stdout, "")


def test_cpp(http: httpx2.Client) -> None:
    code = "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x; }"
    result = submit(http, "/run", type="cpp", solution=code, input="21", expected_output="42")
    assert (result["success"], result["stdout"]) == (True, "42")
    broken = submit(http, "/run", type="cpp", solution="int main() {")
    assert (broken["run_success"], broken["cost"], broken["reason"]) == (False, 0, "")
    assert "error: expected" in broken["stderr"]


@pytest.mark.parametrize("path", ["/judge", "/judge/batch", "/judge/long-batch"])
def test_judging_drops_the_output(http: httpx2.Client, path: str) -> None:
    fields = {"sub_id", "success", "run_success", "cost", "reason"}
    one = python("print(1)", expected_output="1", options={"any": "thing"})
    results = [submit(http, path, **one)] if path == "/judge" else batch(http, path, [one])
    assert [(result["success"], result.keys()) for result in results] == [(True, fields)]


def test_a_signal_and_the_memory_limit_are_failures_of_the_program(http: httpx2.Client) -> None:
    killed = submit(http, "/run", solution="import os; os.kill(os.getpid(), 9)")
    hungry = submit(http, "/run", solution="b = bytearray(2 << 30); b[::4096] = b[::4096]")
    for result in (killed, hungry):
        assert (result["run_success"], result["success"], result["reason"]) == (False, False, "")
    assert "memory limit" in hungry["stderr"]


def test_math_has_no_executor(http: httpx2.Client) -> None:
    assert submit(http, "/run", type="math", solution="1")["reason"] == "internal_error"


def test_no_maximum_and_in_order(http: httpx2.Client) -> None:
    count = 1100  # the native API takes 1024
    submissions = [python(f"print({i})", sub_id=str(i)) for i in range(count)]
    results = batch(http, "/judge/long-batch", submissions)
    assert [result["sub_id"] for result in results] == [str(i) for i in range(count)]
    assert all(result["success"] for result in results)
    assert "stdout" not in results[0]


@pytest.mark.parametrize(
    "body",
    [
        {"type": "batch", "submissions": []},
        {"type": "batch"},
        {"type": "batch", "submissions": [{"type": "python"}]},
        {"type": "batch", "submissions": [{"type": "ruby", "solution": "1"}]},
    ],
)
def test_what_does_not_parse_is_422(http: httpx2.Client, body: Json) -> None:
    assert http.post("/run/long-batch", json=body).status_code == 422


def test_ping_and_status(http: httpx2.Client) -> None:
    assert http.get("/ping").json() == "pong"
    assert http.get("/status").json() == {"queue": 0, "num_workers": 1}
