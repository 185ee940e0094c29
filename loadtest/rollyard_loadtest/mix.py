"""The soak's mix: kinds of programs that RL rollouts write, each with what must come of it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollyard import RunResult

_MIB = 1 << 20

Check = Callable[[RunResult], str]
"""What is wrong with a result, or ""."""


@dataclass(frozen=True)
class Job:
    """One run: a request's fields, and the check of its result."""

    kind: str
    request: dict[str, Any]
    check: Check
    cancel: bool = False
    """To be cancelled while it is queued or runs."""


def _ends(outcome: str, stdout: str | None = None, **fields: Any) -> Check:
    def check(result: RunResult) -> str:
        if result.outcome != outcome:
            return f"{result.outcome} instead of {outcome}: {result.message} {result.stderr[-200:]}"
        if stdout is not None and result.stdout != stdout:
            return f"stdout is {result.stdout[:80]!r} instead of {stdout[:80]!r}"
        for name, value in fields.items():
            if getattr(result, name) != value:
                return f"{name} is {getattr(result, name)!r} instead of {value!r}"
        return ""

    return check


def _small(number: int) -> Job:
    code = f"total = sum(i * i for i in range(1000)) + {number}\nprint(total)"
    return Job("small", {"code": code}, _ends("ok", f"{332833500 + number}\n", exit_code=0))


def _stdin(number: int) -> Job:
    request = {"code": "print(int(input()) * 2)", "stdin": f"{number}\n"}
    return Job("stdin", request, _ends("ok", f"{2 * number}\n"))


def _numpy(number: int) -> Job:
    code = (
        "import numpy as np\na = np.arange(100.0).reshape(10, 10) + np.eye(10)\n"
        f"print(round(float(np.linalg.det(a))) + {number})"
    )
    return Job("numpy", {"code": code}, _ends("ok", f"{number - 7754}\n"))


def _sympy(number: int) -> Job:
    code = (
        "import sympy as sp\nx = sp.symbols('x')\n"
        f"print(sp.integrate(sp.sin(x) * sp.exp(x), x), {number})"
    )
    return Job(
        "sympy", {"code": code}, _ends("ok", f"exp(x)*sin(x)/2 - exp(x)*cos(x)/2 {number}\n")
    )


def _exception(number: int) -> Job:
    code = f"def solve(n):\n    return 1 / (n - {number})\nsolve({number})"
    return Job("exception", {"code": code}, _ends("error", "", exit_code=1))


def _exit_code(number: int) -> Job:
    code = f"import sys; sys.exit({number % 200 + 1})"
    return Job("exit code", {"code": code}, _ends("error", exit_code=number % 200 + 1))


def _signal(number: int) -> Job:
    code = "import os; os.kill(os.getpid(), 11)"
    return Job("signal", {"code": code}, _ends("signal", signal=11))


def _sleeper(number: int) -> Job:
    request = {"code": "import time; time.sleep(60)", "limits": {"timeout_s": 0.2}}
    return Job("timeout", request, _ends("timeout"))


def _spinner(number: int) -> Job:
    request = {"code": "while True: pass", "limits": {"cpu_s": 0.1, "timeout_s": 30}}
    return Job("CPU limit", request, _ends("cpu_timeout"))


def _memory(number: int) -> Job:
    request = {"code": f"b = b'x' * {96 * _MIB}", "limits": {"memory_bytes": 64 * _MIB}}
    return Job("memory kill", request, _ends("memory"))


def _fork_bomb(number: int) -> Job:
    code = """
import os, time
born = 0
try:
    while True:
        if os.fork() == 0:
            try:
                while True: os.fork()
            except OSError: time.sleep(60)
        born += 1
except OSError:
    print("full")
"""
    return Job("fork bomb", {"code": code, "limits": {"pids": 24}}, _ends("ok", "full\n"))


def _many_files(number: int) -> Job:
    code = f"""
import os
for place in ("d/e/f", "/tmp/x", "/dev/shm/y"):
    os.makedirs(place)
    for n in range(60): open(f"{{place}}/{{n}}", "w").write("x" * 100)
open("answer", "w").write("{number}")
os.symlink("/etc/passwd", "link"); os.mkfifo("pipe")
"""
    request = {"code": code, "fetch_files": ["answer", "link"]}
    return Job("many files", request, _ends("ok", "", files={"answer": f"{number}"}))


def _flood(number: int) -> Job:
    code = "import os\nfor _ in range(64): os.write(1, b'y' * 32768)"
    request = {"code": code, "limits": {"output_bytes": 4096}}
    return Job("output flood", request, _ends("ok", stdout_truncated=True))


def _flood_stopped(number: int) -> Job:
    code = "import os\nwhile True: os.write(2, b'y' * 32768)"
    request = {"code": code, "limits": {"output_bytes": 4096}, "on_output_limit": "stop"}
    return Job("flood stopped", request, _ends("output_limit"))


def _daemon(number: int) -> Job:
    code = f"""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    for n in range(1, 32):
        if n not in (9, 19): signal.signal(n, signal.SIG_IGN)
    if os.fork() == 0: os.execvp("sleep", ["sleep", "60"])
    time.sleep(60)
print({number})
"""
    return Job("daemon left", {"code": code}, _ends("ok", f"{number}\n"))


def _cancelled(number: int) -> Job:
    request = {"code": "import time; time.sleep(60)", "limits": {"timeout_s": 60}}
    return Job("cancelled", request, _ends("cancelled"), cancel=True)


_WEIGHTS: dict[Callable[[int], Job], float] = {
    _small: 50, _stdin: 8, _numpy: 10, _exception: 7, _exit_code: 3, _signal: 2, _sympy: 2,
    _sleeper: 3, _spinner: 1, _memory: 2, _fork_bomb: 2, _many_files: 3, _flood: 2,
    _flood_stopped: 1, _daemon: 2, _cancelled: 2,
}  # fmt: skip


def draw(numbers: range, seed: int) -> list[Job]:
    """A job for each number, at random by weight; the same for the same seed and numbers."""
    chance = random.Random(f"{seed}-{numbers.start}")  # noqa: S311 - not for secrets
    makers = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=len(numbers))
    return [make(number) for make, number in zip(makers, numbers, strict=True)]
