"""The tool environment over a real service, across HTTP and two Python versions."""

import json
from collections.abc import AsyncIterator

import pytest

from rollyard import AsyncClient, Limits, RunResult
from rollyard_trainer import parse, verify
from rollyard_trainer.env import PythonToolEnv, Runner, service
from rollyard_trainer.roc import CallStatus
from rollyard_trainer.toy.memo import Memo


@pytest.fixture
async def run(address: str) -> AsyncIterator[Runner]:
    async with AsyncClient(address) as client:
        yield service(client, limits=Limits(timeout_s=1, memory_bytes=128 << 20))


def turn(*programs: str, stdin: str = "") -> str:
    calls = (
        json.dumps({"name": parse.TOOL_NAME, "arguments": {"code": code, "input": stdin}})
        for code in programs
    )
    return "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("print(1 + 1)", "ok", "2"),
        ("x = 3\nx * 2", "ok", "6"),  # as IPython shows it
        ("pass", "ok", ""),
        ("1/0", "exec_error", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "exec_error", "error"),
        ("import os; os.kill(os.getpid(), 9)", "exec_error", "signal"),
        ("while True: pass", "timeout", "timeout"),
        ("b = bytearray(1 << 30)", "oom", "memory"),
        ("print('error')", "ok", "error"),
    ],
)
async def test_each_outcome_is_told_apart(
    run: Runner, code: str, status: CallStatus, shown: str
) -> None:
    (call,) = await PythonToolEnv(run=run).answer(turn(code))
    if code.startswith("b = ") and call.status == "exec_error":
        shown = "MemoryError"  # where the interpreter noticed before the kernel
        status = "exec_error"
    assert call.status == status
    assert shown in call.observation
    assert call.code == code


async def test_standard_input_and_traceback(run: Runner) -> None:
    text = turn("print(input()[::-1])", "def f():\n    1/0\nf()", stdin="abc\n")
    first, second = await PythonToolEnv(run=run).answer(text)
    assert first.observation == "cba"
    assert "line 2, in f" in second.observation
    (short,) = await PythonToolEnv(run=run, traceback=False).answer(turn("1/0"))
    assert short.observation == "ZeroDivisionError: division by zero"


async def test_a_call_that_is_none_never_reaches_the_service(run: Runner) -> None:
    (call,) = await PythonToolEnv(run=run).answer("<tool_call>{]</tool_call>")
    assert call.status == "parse_error"
    (surrogate,) = await PythonToolEnv(run=run).answer(turn("print('\ud800')"))
    assert surrogate.status == "parse_error"


async def test_long_output_loses_its_middle(run: Runner) -> None:
    (call,) = await PythonToolEnv(run=run, max_chars=100).answer(turn("print('a' * 5000)"))
    assert len(call.observation) < 200
    assert "left out" in call.observation


async def test_a_fault_is_retried_and_then_the_rollout_is_infra(run: Runner) -> None:
    tries = 0

    async def failing_twice(code: str, stdin: str) -> RunResult:
        nonlocal tries
        tries += 1
        if tries % 4:
            return RunResult(run_id="x", outcome="infra_error", message="worker was lost")
        return await run(code, stdin)

    (call,) = await PythonToolEnv(run=failing_twice).answer(turn("print(1)"))
    assert (call.status, tries) == ("infra_error", 3)
    (call,) = await PythonToolEnv(run=failing_twice).answer(turn("print(1)"))
    assert (call.status, call.observation) == ("ok", "1")


async def test_a_service_that_is_gone_is_infra_and_never_an_error_of_the_policy() -> None:
    async with AsyncClient("http://127.0.0.1:9", max_retries=0) as client:
        (call,) = await PythonToolEnv(run=service(client)).answer(turn("print(1)"))
    assert call.status == "infra_error"


async def test_memo_runs_a_program_once_and_checks_some_again(run: Runner) -> None:
    memo = Memo(run, recheck=0.2)
    for _ in range(50):
        assert (await memo("print(6 * 7)", "")).stdout == "42\n"
    assert memo.calls == 50
    assert 1 < memo.executed < 30
    assert memo.mismatched == 0
    changing = Memo(run, recheck=0.5)
    for _ in range(20):
        await changing("import time; print(time.time_ns())", "")
    assert changing.mismatched > 0
    nothing = Memo(run, recheck=1)
    for _ in range(5):
        await nothing("print(1)", "")
    assert nothing.executed == 5


async def test_symbolic_answers_are_compared_by_a_run_or_not_at_all(run: Runner) -> None:
    text = "<answer>\\boxed{\\frac{1}{2}}</answer>"
    assert await verify.check(text, "0.5", run) == "correct"
    endless = "<answer>\\boxed{9^{9^{9^{9^9}}}}</answer>"
    assert await verify.check(endless, "0.5", run) in ("wrong", "unverifiable")


def test_every_outcome_of_the_service_has_a_status() -> None:
    from rollyard.types import OUTCOMES
    from rollyard_trainer.env import type_of

    assert set(type_of) == set(OUTCOMES)
