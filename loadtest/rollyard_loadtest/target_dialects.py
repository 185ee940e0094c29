"""Servers that speak SandboxFusion's or code-judge's HTTP, as their own clients drive them.

Their words are mapped to ours as far as they have them: ``ok``, ``error``, ``timeout`` and "ours"
(``infra_error``). A limit other than time is ``error`` to them, so outcomes are compared in these
classes, and output without white space at its ends, up to the 1,000 characters that code-judge
keeps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from rollyard.types import Outcome
from rollyard_loadtest.load import Load
from rollyard_loadtest.tally import Answer
from rollyard_loadtest.target import Lost, Refused, Take, Target
from rollyard_loadtest.target_native import BUSY, session, split_url
from rollyard_loadtest.workload import Work

KEPT_CHARS = 1000
DEFAULT_TIMEOUT_S = 10.0
_CLASSES: dict[Outcome, Outcome] = {"ok": "ok", "timeout": "timeout", "cpu_timeout": "timeout"}


def in_classes(work: Work) -> Work:
    """What the dialects can be asked to say of a work."""
    stdout = None if work.stdout is None else work.stdout.strip()[:KEPT_CHARS]
    return replace(work, outcome=_CLASSES.get(work.outcome, "error"), stdout=stdout)


class _Dialect(Target):
    def __init__(self, url: str, load: Load) -> None:
        self._load = load
        self._base, self._socket = split_url(url)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = session(self._socket, {})

    async def close(self) -> None:
        assert self._session is not None
        await self._session.close()

    async def _post(self, path: str, body: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
        assert self._session is not None
        try:
            async with self._session.post(f"{self._base}{path}", json=body) as answer:
                if answer.status in (*BUSY, 504):
                    raise Refused(places)
                if answer.status != 200:
                    raise Lost(f"HTTP {answer.status}: {(await answer.text())[:200]}")
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Lost(f"{type(error).__name__}: {error}") from None


class SandboxFusionTarget(_Dialect):
    """``POST /run_code``: one program a request."""

    async def send(self, works: Sequence[Work], prefix: str, take: Take) -> None:
        for place, work in enumerate(works):
            limit_s = work.limits.get("timeout_s", DEFAULT_TIMEOUT_S)
            body: dict[str, Any] = {
                "code": work.code, "language": "python", "run_timeout": limit_s,
            }  # fmt: skip
            if work.stdin is not None:
                body["stdin"] = work.stdin
            take(place, _of_run_code(await self._post("/run_code", body, range(place, len(works)))))


def _of_run_code(answer: dict[str, Any]) -> Answer:
    run: dict[str, Any] = answer.get("run_result") or {}
    stdout = str(run.get("stdout") or "").strip()[:KEPT_CHARS]
    if answer["status"] == "SandboxError":
        return Answer("infra_error", message=str(answer.get("message", ""))[:200])
    if run.get("status") == "TimeLimitExceeded":
        return Answer("timeout", stdout)
    wall_ms = float(run.get("execution_time") or 0.0) * 1000
    return Answer("ok" if answer["status"] == "Success" else "error", stdout, wall_ms)


class CodeJudgeTarget(_Dialect):
    """``POST /run/long-batch``, or ``/run`` for a program that comes alone.

    It has no time limit a program: one that never ends is held as long as the server's own.
    """

    async def send(self, works: Sequence[Work], prefix: str, take: Take) -> None:
        submissions = [
            {"type": "python", "solution": work.code, "input": work.stdin} for work in works
        ]
        places = range(len(works))
        if len(submissions) == 1:
            answers = [await self._post("/run", submissions[0], places)]
        else:
            body = {"type": "batch", "submissions": submissions}
            answers = (await self._post("/run/long-batch", body, places))["results"]
        if len(answers) != len(works):
            raise Lost(f"{len(answers)} results for {len(works)} programs")
        busy = [place for place in places if answers[place]["reason"] == "queue_timeout"]
        for place, answer in enumerate(answers):
            if place not in busy:
                take(place, _of_judgement(answer))
        if busy:
            raise Refused(busy)


def _of_judgement(answer: dict[str, Any]) -> Answer:
    stdout = str(answer.get("stdout") or "").strip()[:KEPT_CHARS]
    wall_ms = float(answer.get("cost") or 0.0) * 1000
    match answer["reason"]:
        case "worker_timeout":
            return Answer("timeout", stdout, wall_ms)
        case "":
            return Answer("ok" if answer["run_success"] else "error", stdout, wall_ms)
        case reason:
            return Answer("infra_error", message=str(reason))
