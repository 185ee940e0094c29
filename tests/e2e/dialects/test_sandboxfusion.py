"""SandboxFusion's routes, by its own client package and by hand: each row of its table."""

import asyncio
import base64
from typing import Any

import httpx2
import pytest
import sandbox_fusion
from sandbox_fusion import RunCodeRequest, RunJupyterRequest

Json = dict[str, Any]
CROWD = 200
"""Calls at once: as many as a reward worker has, and each must be answered at its first attempt."""


def program(code: str, **fields: Any) -> RunCodeRequest:
    values: dict[str, Any] = {"language": "python", "code": code, **fields}
    return RunCodeRequest(**values)


def run(http: httpx2.Client, code: str, **fields: object) -> Json:
    answer = http.post("/run_code", json={"code": code, "language": "python", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def notebook(http: httpx2.Client, *cells: str, **fields: object) -> Json:
    answer = http.post("/run_jupyter", json={"cells": cells, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_its_client_runs_code(endpoint: str) -> None:
    request = program("print(input())", stdin="hello")
    answer = sandbox_fusion.run_code(request, endpoint, max_attempts=1)
    assert answer.run_result is not None
    assert (answer.status, answer.run_result.stdout) == ("Success", "hello\n")
    assert answer.run_result.return_code == 0


def test_its_client_concurrently(endpoint: str) -> None:
    requests = [[program(f"print({i})")] for i in range(CROWD)]
    answers = sandbox_fusion.run_concurrent(  # pyright: ignore[reportUnknownMemberType]
        sandbox_fusion.run_code,
        args=requests,
        kwargs=[{"endpoint": endpoint, "max_attempts": 1}] * CROWD,
        concurrency=CROWD,
    )
    assert [answer.run_result.stdout for answer in answers] == [f"{i}\n" for i in range(CROWD)]


def test_its_async_client(endpoint: str) -> None:
    async def scenario() -> list[Any]:
        calls = [
            sandbox_fusion.run_code_async(
                program(f"raise ValueError({i})"), endpoint, max_attempts=1
            )
            for i in range(CROWD)
        ]
        return await asyncio.gather(*calls)

    for i, answer in enumerate(asyncio.run(scenario())):
        assert (answer.status, answer.run_result.return_code) == ("Failed", 1)
        assert answer.run_result.stderr.endswith(f"ValueError: {i}\n")


def test_its_client_runs_a_notebook(endpoint: str) -> None:
    cells: dict[str, Any] = {"cells": ["a = 1", "print(a)", "a + 1", "1 / 0"]}
    request = RunJupyterRequest(**cells)
    answer = sandbox_fusion.run_jupyter(request, endpoint, max_attempts=1)
    assert answer.status == "Success"
    assert [cell.stdout for cell in answer.cells] == ["", "1\n", "", ""]
    assert answer.cells[2].display == [{"text/plain": "2"}]
    assert answer.cells[3].error[0]["ename"] == "ZeroDivisionError"


def test_its_summary_of_a_compile_error(endpoint: str) -> None:
    mapping = sandbox_fusion.SummaryMapping(CompileFailed="does not compile", RunFailed="fails")
    for code, summary in (
        ("int main() { return 0; }", "Success"),
        ("int main() { return 1; }", "fails"),
        ("int main() {", "does not compile"),
    ):
        request = program(code, language="cpp")
        answer = sandbox_fusion.run_code(request, endpoint, max_attempts=1)
        assert sandbox_fusion.summary_run_code_result(answer, mapping) == summary


@pytest.mark.parametrize(
    ("code", "status", "return_code"),
    [
        ("pass", "Success", 0),
        ("import sys; sys.exit(7)", "Failed", 7),
        ("import os; os.kill(os.getpid(), 11)", "Failed", -11),
        ("import os; os.abort()", "Failed", -6),
    ],
)
def test_ends(http: httpx2.Client, code: str, status: str, return_code: int) -> None:
    answer = run(http, code)
    assert (answer["status"], answer["message"]) == (status, "")
    assert answer["compile_result"] is None
    assert answer["run_result"]["status"] == "Finished"
    assert answer["run_result"]["return_code"] == return_code


def test_time_limit_keeps_the_output(http: httpx2.Client) -> None:
    answer = run(http, "print('partial')\nwhile True: pass", run_timeout=0.5)
    assert (answer["status"], answer["message"]) == ("Failed", "")
    result = answer["run_result"]
    assert (result["status"], result["return_code"]) == ("TimeLimitExceeded", None)
    assert result["stdout"] == "partial\n"


def test_compile_error(http: httpx2.Client) -> None:
    answer = run(http, "int main() {", language="cpp")
    assert (answer["status"], answer["message"], answer["run_result"]) == ("Failed", "", None)
    compiled = answer["compile_result"]
    assert (compiled["status"], compiled["return_code"]) == ("Finished", 1)
    assert "error: expected" in compiled["stderr"]


def test_compiled_program(http: httpx2.Client) -> None:
    answer = run(http, "int main() { return 5; }", language="cpp")
    assert (answer["status"], answer["compile_result"]["return_code"]) == ("Failed", 0)
    assert answer["compile_result"]["status"] == "Finished"
    assert answer["run_result"]["return_code"] == 5


def test_answer_has_exactly_its_fields(http: httpx2.Client) -> None:
    answer = run(http, "print(1)")
    fields = {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}
    assert answer.keys() == fields
    # cpu_time is ours; its own clients ignore it.
    known = {"status", "execution_time", "return_code", "stdout", "stderr", "cpu_time"}
    assert answer["run_result"].keys() == known
    answer = notebook(http, "1")
    assert answer.keys() == {"status", "message", "driver", "cells", "executor_pod_name", "files"}
    assert answer["cells"][0].keys() == {"stdout", "stderr", "display", "error"}


def test_compiler_out_of_time(http: httpx2.Client) -> None:
    code = '#include <regex>\nint main() { std::regex r("a"); }'
    answer = run(http, code, language="cpp", compile_timeout=0.05)
    assert (answer["status"], answer["run_result"]) == ("Failed", None)
    assert answer["compile_result"]["status"] == "TimeLimitExceeded"


def test_memory_limit_is_of_memory_not_of_addresses(http: httpx2.Client) -> None:
    numpy = "import numpy; print(numpy.linalg.det(numpy.eye(3)))"
    assert run(http, numpy, memory_limit_MB=256)["run_result"]["stdout"] == "1.0\n"
    answer = run(http, "bytearray(300 << 20)", memory_limit_MB=100)
    assert answer["run_result"]["return_code"] == -9
    assert "memory limit" in answer["run_result"]["stderr"]


def test_much_output_is_no_timeout(http: httpx2.Client) -> None:
    result = run(http, "print('x' * 500_000)")["run_result"]
    assert (result["status"], len(result["stdout"])) == ("Finished", 500_001)


def test_files_go_and_come(http: httpx2.Client) -> None:
    answer = run(
        http,
        "open('out/b.bin', 'wb').write(open('a.bin', 'rb').read()[::-1])",
        files={
            "a.bin": base64.b64encode(b"\x00\xff").decode(),
            "out/keep": "",
            "skipped": None,
            "x/IGNORE_THIS_FILE": "not base64!",
        },
        fetch_files=["./out/b.bin", "missing"],
    )
    assert answer["files"] == {"./out/b.bin": base64.b64encode(b"\xff\x00").decode()}


def test_pytest_passes_and_fails(http: httpx2.Client) -> None:
    good = run(http, "def test_a():\n    assert 1 + 1 == 2\n", language="pytest")
    assert (good["status"], good["run_result"]["return_code"]) == ("Success", 0)
    code = "def test_a():\n    assert 1 == 2\n\ndef test_b():\n    pass\n"
    bad = run(http, code, language="pytest")
    assert (bad["status"], bad["run_result"]["return_code"]) == ("Failed", 1)
    assert "1 failed, 1 passed" in bad["run_result"]["stdout"]
    chosen = run(http, code, language="pytest", args=["-k", "test_b"])
    assert chosen["status"] == "Success"


def test_bash(http: httpx2.Client) -> None:
    answer = run(http, "read x; echo $((x * 2)); exit 3", language="bash", stdin="21\n")
    assert (answer["run_result"]["stdout"], answer["run_result"]["return_code"]) == ("42\n", 3)


def test_language_defaults_to_python(http: httpx2.Client) -> None:
    answer = http.post("/run_code", json={"code": "print(1)", "unknown": "ignored"})
    assert answer.json()["run_result"]["stdout"] == "1\n"


def test_language_that_cannot_be_run_is_named(http: httpx2.Client) -> None:
    answer = run(http, "fn main() {}", language="rust")
    assert answer["status"] == "SandboxError"
    assert "'rust'" in answer["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "code"),
        ({"code": 5}, "code"),
        ({"code": "x", "language": "klingon"}, "language"),
        ({"code": "x", "run_timeout": 0}, "run_timeout"),
        ({"code": "x", "run_timeout": 1e9}, "run_timeout"),
        ({"code": "x", "files": {"/etc/passwd": ""}}, "files"),
        ({"code": "x", "files": {"a": "abc"}}, "files.a"),
        ({"code": "x", "fetch_files": ["../a"]}, "fetch_files"),
    ],
)
def test_bad_schema_is_422(http: httpx2.Client, body: Json, field: str) -> None:
    answer = http.post("/run_code", json=body)
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["field"] == field


def test_ping(http: httpx2.Client) -> None:
    assert http.get("/v1/ping").json() == "pong"


def test_cells_see_children_awaits_and_rich_values(http: httpx2.Client) -> None:
    answer = notebook(
        http,
        "import subprocess; done = subprocess.run(['echo', 'child'])",
        "import asyncio\nawait asyncio.sleep(0)\n'awaited'",
        "import pandas; pandas.DataFrame({'a': [1]})",
        "import sys; print('e', file=sys.stderr)",
        "display(1, 2)\n3",
        "exit(4)",
        "def broken(:",
        "__name__",
    )
    assert answer["driver"]["return_code"] == 0
    cells = answer["cells"]
    assert cells[0]["stdout"] == "child\n"
    assert cells[1]["display"] == [{"text/plain": "'awaited'"}]
    assert "<table" in cells[2]["display"][0]["text/html"]
    assert (cells[3]["stdout"], cells[3]["stderr"]) == ("", "e\n")
    assert [one["text/plain"] for one in cells[4]["display"]] == ["1", "2", "3"]
    assert cells[5]["error"][0]["ename"] == "SystemExit"
    assert cells[6]["error"][0]["ename"] == "SyntaxError"
    assert cells[7]["display"] == [{"text/plain": "'__main__'"}]
    assert [len(cell["error"]) for cell in cells] == [0, 0, 0, 0, 0, 1, 1, 0]


def test_cells_survive_the_total_timeout(http: httpx2.Client) -> None:
    cells = ("print('kept'); 1", "print('begun')\nwhile True: pass", "print('never')")
    answer = notebook(http, *cells, total_timeout=0.5)
    assert (answer["status"], answer["driver"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert [cell["stdout"] for cell in answer["cells"]] == ["kept\n", "begun\n"]
    assert answer["cells"][0]["display"] == [{"text/plain": "1"}]


def test_cell_timeout_ends_one_cell(http: httpx2.Client) -> None:
    answer = notebook(http, "while True: pass", "print('next')", cell_timeout=0.3)
    assert answer["cells"][0]["error"][0]["ename"] == "CellTimeout"
    assert answer["cells"][1]["stdout"] == "next\n"


def test_cells_that_print_too_much_keep_their_place(http: httpx2.Client) -> None:
    cells = [f"print({letter!r} * 400_000)" for letter in "abcdef"]
    answer = notebook(http, *cells, "print('last')")
    outputs = [cell["stdout"] for cell in answer["cells"]]
    assert len(outputs) == 7
    assert outputs[0] == "a" * 400_000 + "\n"
    assert outputs[6] == "last\n"
    for letter, output in zip("abcdef", outputs, strict=False):
        assert set(output.partition("\n[...")[0]) <= {letter, "\n"}


def test_notebook_memory_limit_is_enforced(http: httpx2.Client) -> None:
    answer = notebook(
        http, "print('kept')", "b = bytearray(300 << 20)", "print(3)", memory_limit_MB=100
    )
    assert (answer["status"], answer["driver"]["return_code"]) == ("Failed", -9)
    assert "memory limit" in answer["driver"]["stderr"]
    assert [cell["stdout"] for cell in answer["cells"]] == ["kept\n", ""]


def test_notebook_bad_schema(http: httpx2.Client) -> None:
    bad: list[Json] = [{}, {"cells": "1"}, {"cells": ["1"], "kernel": "julia"},
                       {"cells": ["1"], "total_timeout": 0}]  # fmt: skip
    for body in bad:
        assert http.post("/run_jupyter", json=body).status_code == 422, body


def test_a_cell_that_kills_the_interpreter(http: httpx2.Client) -> None:
    answer = notebook(http, "print(1)", "import os; os._exit(9)", "print(3)")
    assert (answer["status"], answer["driver"]["return_code"]) == ("Failed", 9)
    assert [cell["stdout"] for cell in answer["cells"]] == ["1\n", ""]


def test_notebook_files(http: httpx2.Client) -> None:
    text = base64.b64encode(b"in").decode()
    answer = notebook(
        http,
        "open('b', 'w').write(open('a').read() * 2);",
        files={"a": text},
        fetch_files=["b"],
    )
    assert answer["files"] == {"b": base64.b64encode(b"inin").decode()}
