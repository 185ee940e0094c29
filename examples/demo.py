"""The demo behind ``scripts/demo``: real programs in real jails, checked one by one.

Starts a whole service with ``rollyard.local()``; runs the 164 HumanEval programs with their
tests, and then a mix of the calls that RL rollouts make; prints what was expected, what came and
how long it took; stops everything and proves that nothing is left running.
Exit code 0 only if every outcome is the expected one and nothing is left.
"""

import argparse
import asyncio
import ctypes
import gzip
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import rollyard

HUMANEVAL = Path(__file__).parent / "data" / "HumanEval.jsonl.gz"
BATCH_RUNS = 64
CALLS_AT_ONCE = 32
MIXED_SEED = 20260101
LOOP_TIMEOUT_S = 0.5
_PR_SET_CHILD_SUBREAPER = 36

console = Console()


@dataclass(frozen=True)
class Call:
    """A program with what must come of it."""

    kind: str
    request: rollyard.RunRequest
    outcome: str
    stdout: str | None = None

    def is_right(self, result: rollyard.RunResult) -> bool:
        printed = self.stdout is None or result.stdout == self.stdout
        return result.outcome == self.outcome and printed


@dataclass(frozen=True)
class Answer:
    """What came, and the milliseconds from the call to its answer."""

    call: Call
    result: rollyard.RunResult
    latency_ms: float


def humaneval() -> list[Call]:
    """The reference solutions with their tests; each must end with ``ok``."""
    with gzip.open(HUMANEVAL, "rt") as lines:
        problems = [json.loads(line) for line in lines]
    return [
        Call(
            "HumanEval",
            rollyard.RunRequest(
                code=f"{one['prompt']}{one['canonical_solution']}\n{one['test']}\n"
                f"check({one['entry_point']})\n",
                job="demo-humaneval",
            ),
            "ok",
        )
        for one in problems
    ]


def mixed(count: int) -> list[Call]:
    """Calls as a rollout makes them; shuffled, the same in every demo."""
    chance = random.Random(MIXED_SEED)  # noqa: S311 - a reproducible mix, not a secret
    kinds = chance.choices(
        ["arithmetic", "numpy", "sympy", "exception", "endless loop"],
        weights=[60, 20, 12, 5, 3],
        k=count,
    )
    return [_mixed_call(kind, chance.randrange(2, 50)) for kind in kinds]


def _mixed_call(kind: str, n: int) -> Call:
    outcome, stdout, limits = "ok", None, rollyard.Limits()
    match kind:
        case "arithmetic":
            code, stdout = (
                f"print(sum(i * i for i in range({n})))",
                str(sum(i * i for i in range(n))),
            )
        case "numpy":
            code = f"import numpy as np\nprint(int((np.ones(({n}, {n})) @ np.arange({n})).sum()))"
            stdout = str(n * sum(range(n)))
        case "sympy":
            code = (
                "import sympy as s\nx = s.symbols('x')\n"
                f"print(s.diff(x**{n} * s.sin(x), x).subs(x, 0))"
            )
            stdout = "0"
        case "exception":
            code, outcome, stdout = f"print({n})\nraise ValueError({n})", "error", str(n)
        case _:
            code, outcome = "while True:\n    pass", "timeout"
            limits = rollyard.Limits(timeout_s=LOOP_TIMEOUT_S)
    return Call(
        kind,
        rollyard.RunRequest(code=code, limits=limits, job="demo-mixed"),
        outcome,
        None if stdout is None else stdout + "\n",
    )


async def run_in_batches(client: rollyard.AsyncClient, calls: Sequence[Call]) -> list[Answer]:
    """Send calls in batches; results come as they finish."""
    answers: list[Answer] = []
    with _progress() as progress:
        task = progress.add_task("HumanEval", total=len(calls))
        for start in range(0, len(calls), BATCH_RUNS):
            batch = {
                f"demo-{time.monotonic_ns()}-{index}": call
                for index, call in enumerate(calls[start : start + BATCH_RUNS])
            }
            requests = [
                call.request.model_copy(update={"run_id": run_id}) for run_id, call in batch.items()
            ]
            sent = time.monotonic()
            async for result in client.run_batch(requests):
                latency_ms = (time.monotonic() - sent) * 1000
                answers.append(Answer(batch[result.run_id], result, latency_ms))
                progress.advance(task)
    return answers


async def run_one_by_one(client: rollyard.AsyncClient, calls: Sequence[Call]) -> list[Answer]:
    """Make single calls, many at a time, as concurrent rollouts do."""
    answers: list[Answer] = []
    waiting = iter(calls)
    with _progress() as progress:
        task = progress.add_task("mixed calls", total=len(calls))

        async def rollout() -> None:
            for call in waiting:
                sent = time.monotonic()
                result = await client.submit(call.request)
                answers.append(Answer(call, result, (time.monotonic() - sent) * 1000))
                progress.advance(task)

        await asyncio.gather(*(rollout() for _ in range(CALLS_AT_ONCE)))
    return answers


def _progress() -> Progress:
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def report(title: str, answers: Sequence[Answer], elapsed_s: float) -> None:
    """Print a row for each kind of call, and the rate of all."""
    title = f"{title}: {len(answers)} runs in {elapsed_s:.1f} s, {len(answers) / elapsed_s:.0f}/s"
    table = Table(
        title=title,
        title_justify="left",
        caption="in ms: took, from call to answer; wait, in the queue; run, in the jail",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("call", "expected", "got"):
        table.add_column(name, vertical="bottom", no_wrap=True)
    for name in ("took\np50", "\np95", "\np99", "wait\np50", "\np99", "run\np50", "\np99"):
        table.add_column(name, justify="right")
    for kind in sorted({answer.call.kind for answer in answers}):
        some = [answer for answer in answers if answer.call.kind == kind]
        latency = [answer.latency_ms for answer in some]
        queued = [answer.result.queued_ms for answer in some]
        wall = [answer.result.wall_ms for answer in some]
        table.add_row(
            kind,
            _counts(answer.call.outcome for answer in some),
            _counts(answer.result.outcome for answer in some),
            *(_at(latency, share) for share in (0.5, 0.95, 0.99)),
            *(_at(values, share) for values in (queued, wall) for share in (0.5, 0.99)),
        )
    console.print(table)
    for answer in [one for one in answers if not one.call.is_right(one.result)][:5]:
        console.print(f"[red]wrong[/]: {answer.call.kind}, expected {answer.call.outcome}:")
        console.print(answer.call.request.code, markup=False, highlight=False)
        console.print(answer.result.model_dump(exclude_defaults=True))


def _counts(outcomes: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(outcomes).items()))


def _at(values: Sequence[float], share: float) -> str:
    """The value below which ``share`` of all lie (nearest rank)."""
    value = sorted(values)[max(0, math.ceil(len(values) * share) - 1)]
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


async def demonstrate(options: argparse.Namespace) -> bool:
    """Start, run, report, stop; True when every outcome was right."""
    service = rollyard.local(
        slots=options.slots, allow_degraded=options.allow_degraded, start_timeout_s=120
    )
    console.print("starting Valkey, a gateway and a worker …")
    began = time.monotonic()
    async with service as client:
        first = await client.run("print('first')")
        console.print(f"first result after {time.monotonic() - began:.1f} s: {first.outcome}")
        if first.degraded:
            console.print(f"[yellow]without {', '.join(first.degraded)}[/]: see `rollyard doctor`")
        answers: list[Answer] = []
        for title, calls, run in (
            ("HumanEval, batches", humaneval(), run_in_batches),
            ("mixed rollout calls", mixed(options.mixed), run_one_by_one),
        ):
            began = time.monotonic()
            these = await run(client, calls)
            report(title, these, time.monotonic() - began)
            answers += these
    wrong = sum(not answer.call.is_right(answer.result) for answer in answers)
    colour = "red" if wrong else "green"
    console.print(f"[{colour}]{len(answers) - wrong} of {len(answers)} runs as expected[/]")
    return not wrong


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own: none can then be overlooked."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left_over() -> list[str]:
    """Command lines of our descendants that still run."""
    own = os.getpid()
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal():
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == own and state not in "ZX":
                    found.append((entry / "cmdline").read_text().replace("\0", " ").strip())
        except OSError:
            continue  # it ended while we looked
    return found


def main() -> int:
    """Run the demo; return its exit code."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--mixed", type=int, default=400, help="mixed calls (default: 400)")
    parser.add_argument("--slots", type=int, default=None, help="programs at once")
    parser.add_argument(
        "--allow-degraded",
        action="store_true",
        help="run although the machine cannot give every sandbox layer",
    )
    options = parser.parse_args()
    adopt_orphans()
    try:
        right = asyncio.run(demonstrate(options))
    except rollyard.RollyardError as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}", highlight=False)
        right = False
    remains = left_over()
    for line in remains:
        console.print(f"[red]still running[/]: {line}", highlight=False)
    if not remains:
        console.print("everything stopped, nothing is left running")
    return 0 if right and not remains else 1


if __name__ == "__main__":
    sys.exit(main())
