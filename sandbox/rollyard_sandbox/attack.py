"""``rollyard doctor --attack``: every attempt to get out of the sandbox, tried on this machine.

Each attempt runs as a hostile program would, in a real slot of this installation, and is judged
from outside: by the report of the slot's PID 1, by what is left in the slot, and by whether the
slot still serves, unharmed, afterwards.
"""

import json
import platform
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox.attempts import ATTEMPTS, Attempt
from rollyard_sandbox.channels import Channel, measure
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.image import ImageError
from rollyard_sandbox.jail import JailError
from rollyard_sandbox.machine import open_machine
from rollyard_sandbox.pool import Pool
from rollyard_sandbox.reports import SlotReport
from rollyard_sandbox.settings import WorkerSettings
from rollyard_sandbox.slots import Slot, SlotLost

_DISK_BYTES = 16 << 20
_LIMITS = LimitsSpec(
    timeout_s=30.0, cpu_s=None, memory_bytes=256 << 20, disk_bytes=_DISK_BYTES, pids=64,
    output_bytes=1 << 20,
)  # fmt: skip
_SHOWN = 160


@dataclass(frozen=True)
class Verdict:
    """What came of one attempt; ``detail`` says what got through."""

    name: str
    question: str
    held: bool
    detail: str = ""


async def attack(
    settings: WorkerSettings, *, say: Callable[[str], None]
) -> tuple[list[Verdict], list[Channel]]:
    """Make every attempt on the first of the templates, and measure the known channels.

    Raises:
        ImageError, JailError, SlotLost, OSError: no jail can run here at all.
    """
    async with open_machine(settings, say=say) as machine:
        template = machine.templates[0]
        verdicts = [await _try(machine.pool, template, attempt) for attempt in ATTEMPTS]
        return verdicts, await measure(machine.pool, template, _DISK_BYTES, _run)


async def _try(pool: Pool, template: str, attempt: Attempt) -> Verdict:
    slot = await pool.acquire(template, _DISK_BYTES)
    try:
        got = await _judge(slot, attempt)
    except (SlotLost, OSError) as error:
        # A program that can take its slot down can make its failure look like ours.
        got = f"the slot was lost: {error}"
    finally:
        await pool.release(slot)
    return Verdict(attempt.name, attempt.question, not got, got)


async def _judge(slot: Slot, attempt: Attempt) -> str:
    """What got through, or nothing."""
    secret = secrets.token_hex(12)
    if attempt.before:
        report = await _run(slot, attempt.first(secret), stdin=secret)
        if report.exit_code != 0 or not slot.usable:
            return f"the run before it failed: {report.stderr[-300:]}"
    report = await _run(slot, attempt.code(f"{secret[:-1]}[{secret[-1]}]"))
    if got := attempt.held(report):
        return got
    if left := slot.pids():
        return f"processes are left: {left}"
    if slot.usable:
        report = await _run(slot, "print('unharmed')")
        if (report.exit_code, report.stdout) != (0, "unharmed\n"):
            return f"the slot is harmed: {report.stderr[-300:] or report}"
    return ""


async def _run(slot: Slot, code: str, *, stdin: str | None = None) -> SlotReport:
    spec = RunSpec(
        run_id="attack", code=code, stdin=stdin, files={}, fetch_files=["*"], limits=_LIMITS,
        template=slot.template, on_output_limit="truncate", job="attack",
    )  # fmt: skip
    report, _ = await Execution(slot, spec).run()
    return report


async def examine(settings: WorkerSettings) -> dict[str, Any]:
    """Everything as one JSON object; never raises for what the machine lacks, but says it."""
    facts: dict[str, Any] = {"kernel": platform.release(), "ok": False, "attempts": []}
    if platform.machine() != "x86_64":
        return {**facts, "problem": f"attempts are in x86-64's calls, not {platform.machine()}'s"}
    notes: list[str] = []
    try:
        verdicts, channels = await attack(settings, say=notes.append)
    except (ImageError, JailError, SlotLost, OSError) as error:
        return {**facts, "problem": str(error), "notes": notes}
    facts["attempts"] = [asdict(verdict) for verdict in verdicts]
    facts["channels"] = [asdict(channel) for channel in channels]
    return {**facts, "ok": all(verdict.held for verdict in verdicts), "notes": notes}


def as_text(facts: dict[str, Any], *, as_json: bool) -> str:
    """The table, or the object."""
    if as_json:
        return json.dumps(facts, indent=2) + "\n"
    lines: list[str] = []
    for one in facts["attempts"]:
        lines.append(
            f"{'held    ' if one['held'] else 'NOT HELD'}  {one['name']:<16} {one['question']}"
        )
        if not one["held"]:
            lines.append(f"{'':<10}{one['detail'][:_SHOWN]}")
    lines += [
        f"known     {one['name']:<16} {one['question']} "
        + (f"Yes, {one['bits_per_s']} bits/s." if one["bits_per_s"] else "No.")
        for one in facts.get("channels", [])
    ]
    through = sum(not one["held"] for one in facts["attempts"])
    lines += ["", *facts.get("notes", [])]
    if problem := facts.get("problem"):
        lines.append(f"Nothing could be tried: {problem}")
    else:
        held = f"{through} not held" if through else "all held"
        lines.append(f"{len(facts['attempts'])} attempts, {held}. Known channels: SECURITY.md.")
    return "\n".join(lines) + "\n"
