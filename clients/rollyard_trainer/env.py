"""The tool environment: calls of one assistant turn, run by a Rollyard service.

What a model reads follows the paper: output, or the value of the last expression as IPython shows
it, or the error with its traceback, or that it timed out, or why its call could not be parsed.
How a call ended is the service's structured outcome; no text is matched.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from rollyard import AsyncClient, BadRequest, Limits, PayloadTooLarge, RollyardError, RunResult
from rollyard.integrations.observation import ending, shortened
from rollyard.types import Outcome
from rollyard_trainer import parse
from rollyard_trainer.roc import CallStatus, ToolCall

type_of: dict[Outcome, CallStatus] = {
    "ok": "ok",
    "error": "exec_error",
    "compile_error": "exec_error",
    "signal": "exec_error",
    "timeout": "timeout",
    "cpu_timeout": "timeout",
    "memory": "oom",
    "output_limit": "output_limit",
    "cancelled": "infra_error",
    "expired": "infra_error",
    "infra_error": "infra_error",
}
"""Call status of each of the service's outcomes."""

Runner = Callable[[str, str], Awaitable[RunResult]]
"""Runs (code, stdin)."""

FAULT_RETRIES = 2  # on top of the SDK's own, which cover connections and overload


def service(client: AsyncClient, *, limits: Limits | None = None, job: str = "default") -> Runner:
    """A runner that sends each program to the service; concurrent ones travel together."""
    chosen = limits or Limits()

    async def run(code: str, stdin: str) -> RunResult:
        return await client.run(code, stdin=stdin, limits=chosen, echo_last=True, job=job)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonToolEnv:
    """Answers assistant turns. It has no state: one serves all rollouts.

    Args:
        run: Runs one program, such as :func:`service`.
        max_chars: Longest observation; longer text loses its middle.
        traceback: False: only the last line of a traceback, for small context windows.
        on_infra: ``drop`` is right: a call that the service failed ends its rollout, which then
            leaves its group. ``observe`` is what the released code does: the policy reads of the
            fault, and is trained on it.
        fault_retries: Times that a call is run again which the service failed.
    """

    run: Runner
    max_chars: int = 10_000
    traceback: bool = True
    on_infra: Literal["drop", "observe"] = "drop"
    fault_retries: int = FAULT_RETRIES

    async def answer(self, turn: str) -> list[ToolCall]:
        """Run all calls of a turn at once; empty when it made none."""
        return list(await asyncio.gather(*(self._one(call) for call in parse.calls(turn))))

    async def _one(self, call: parse.Call) -> ToolCall:
        if call.error:
            return ToolCall("parse_error", shortened(call.error, self.max_chars))
        for left in range(self.fault_retries, -1, -1):
            try:
                result = await self.run(call.code, call.stdin)
            except (BadRequest, PayloadTooLarge) as error:  # not Unicode, or far too long
                return ToolCall("parse_error", f"Failed to parse tool call: {error}", call.code)
            except RollyardError as error:  # after all of the SDK's retries
                return ToolCall("infra_error", f"Error when executing tool: {error}", call.code)
            if not (result.is_infra and left):
                shown = render(result, max_chars=self.max_chars, traceback=self.traceback)
                return ToolCall(type_of[result.outcome], shown, call.code)
        raise AssertionError("unreachable")


def render(result: RunResult, *, max_chars: int = 10_000, traceback: bool = True) -> str:
    """What the policy reads of a run; see :class:`PythonToolEnv`."""
    if result.is_infra:  # read by nobody unless on_infra is "observe"
        return f"Error when executing tool: {result.message or result.outcome}"
    stderr = result.stderr.strip("\n")
    if not traceback:
        stderr = stderr.rpartition("\n")[2]
    parts = [part for part in (result.stdout.rstrip("\n"), stderr) if part]
    if result.outcome not in ("ok", "error") or (result.outcome == "error" and not stderr):
        parts.append(ending(result))
    return shortened("\n".join(parts), max_chars)
