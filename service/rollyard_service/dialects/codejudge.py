"""code-judge's routes: ``/ping /status /run /judge`` and their batches.

Whatever parses is answered 200. ``queue_timeout`` is how all our faults are said: it is the one
reason on which its clients send a submission again; any other would reach the model.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from rollyard.types import RunRequest, RunResult
from rollyard_queue.base import Queue, QueueUnavailable
from rollyard_service.dialects.runner import Busy, DialectRunner, checked, malformed, stderr_of
from rollyard_service.refusal import Refusal, unavailable

EXECUTION_S = 10.0
"""What a program may take; there is no field for it."""
QUEUE_LIFE_S = 4.0
"""A submission that no worker started within this ends as queue_timeout."""
LONG_QUEUE_LIFE_S = 40.0
"""The same in a long batch. rStar2's client gives up after 60 s and then sends all of it again;
told before, it sends only what is missing."""
KEPT_CHARS = 1000
"""Of stdout and stderr, from the start."""
CHUNK = 64
CHUNKS_AT_ONCE = 8
"""A batch may be of any length: this many of its submissions at once are in the queue, so that
the time that one may wait there begins when it gets there."""
ANSWER_S = 2.0

_TIMEOUT_LINE = "Suicide from timeout."

Judgement = dict[str, Any]


class Submission(BaseModel):
    """One program. ``options`` is accepted and, as there, has no effect."""

    model_config = ConfigDict(extra="ignore")

    sub_id: str | None = None
    type: Literal["python", "cpp", "math"]
    options: dict[str, Any] | None = None
    solution: str
    input: str | None = None
    expected_output: str | None = None


class BatchSubmission(BaseModel):
    """Many programs; no maximum."""

    model_config = ConfigDict(extra="ignore")

    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: Annotated[list[Submission], Field(min_length=1)]


class CodeJudgeRoutes:
    """Handlers of code-judge's routes."""

    models = (Submission, BatchSubmission)

    def __init__(self, runner: DialectRunner, queue: Queue) -> None:
        self._runner = runner
        self._queue = queue

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(redirect_slashes=False, tags=["code-judge"])
        router.add_api_route("/ping", self.ping)
        router.add_api_route("/status", self.status)
        for path, handler, model in (
            ("/run", self.run, Submission),
            ("/judge", self.judge, Submission),
            ("/run/batch", self.run_batch, BatchSubmission),
            ("/judge/batch", self.judge_batch, BatchSubmission),
            ("/run/long-batch", self.run_long_batch, BatchSubmission),
            ("/judge/long-batch", self.judge_long_batch, BatchSubmission),
        ):
            router.add_api_route(
                path, handler, methods=["POST"], openapi_extra=DialectRunner.documented(model)
            )
        return router

    async def ping(self) -> str:
        """This process answers."""
        return "pong"

    async def status(self) -> dict[str, int]:
        """How many submissions wait, and how many workers there are."""
        try:
            async with asyncio.timeout(ANSWER_S):
                stats = await self._queue.stats()
        except (QueueUnavailable, TimeoutError) as error:
            raise unavailable("the queue does not answer") from error
        return {"queue": stats.queued, "num_workers": stats.workers}

    async def run(self, request: Request) -> Response:
        """Run one program, and compare its output if asked to."""
        return JSONResponse(await self._one(request))

    async def judge(self, request: Request) -> Response:
        """As ``/run``, without the output."""
        return JSONResponse(_without_output(await self._one(request)))

    async def run_batch(self, request: Request) -> Response:
        """Run many programs; results in their order."""
        return JSONResponse(await self._many(request, QUEUE_LIFE_S))

    async def judge_batch(self, request: Request) -> Response:
        """As ``/run/batch``, without the output."""
        return _judged(await self._many(request, QUEUE_LIFE_S))

    async def run_long_batch(self, request: Request) -> Response:
        """As ``/run/batch``; submissions may wait longer."""
        return JSONResponse(await self._many(request, LONG_QUEUE_LIFE_S))

    async def judge_long_batch(self, request: Request) -> Response:
        """As ``/run/long-batch``, without the output."""
        return _judged(await self._many(request, LONG_QUEUE_LIFE_S))

    async def _one(self, request: Request) -> Judgement:
        submission = await self._runner.body(request, Submission)
        [judgement] = await self._judgements(request, [submission], QUEUE_LIFE_S)
        return judgement

    async def _many(self, request: Request, life_s: float) -> Judgement:
        batch = await self._runner.body(request, BatchSubmission)
        room = asyncio.Semaphore(CHUNKS_AT_ONCE)

        async def judged(chunk: Sequence[Submission]) -> list[Judgement]:
            async with room:
                return await self._judgements(request, chunk, life_s)

        todo = batch.submissions
        chunks = [todo[start : start + CHUNK] for start in range(0, len(todo), CHUNK)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(judged(chunk)) for chunk in chunks]
        except* ClientDisconnect:
            raise ClientDisconnect from None
        results = [judgement for task in tasks for judgement in task.result()]
        return {"sub_id": batch.sub_id or str(uuid4()), "results": results}

    async def _judgements(
        self, request: Request, submissions: Sequence[Submission], life_s: float
    ) -> list[Judgement]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        judgements: dict[int, Judgement] = {}
        runs: dict[int, RunRequest] = {}
        for place, submission in enumerate(submissions):
            if submission.type == "math":
                judgements[place] = _unjudged(submission, "internal_error", 0.0)
                continue
            try:
                runs[place] = self._run_request(submission, life_s)
            except Refusal:
                judgements[place] = _unjudged(submission, "invalid_input", 0.0)
        try:
            results = await self._runner.results(request, list(runs.values())) if runs else []
        except Busy:
            waited_s = loop.time() - began
            return [_unjudged(submission, "queue_timeout", waited_s) for submission in submissions]
        for place, result in zip(runs, results, strict=True):
            submission = submissions[place]
            if result.is_infra:
                waited_s = loop.time() - began
                judgements[place] = _unjudged(submission, "queue_timeout", waited_s)
            else:
                judgements[place] = _judgement(submission, result)
        return [judgements[place] for place in range(len(submissions))]

    def _run_request(self, submission: Submission, life_s: float) -> RunRequest:
        limits = self._runner.limits(timeout_s=min(EXECUTION_S, self._runner.longest_s))
        expected = len((submission.expected_output or "").encode("utf-8", "replace"))
        if 2 * expected > self._runner.largest_output_bytes:
            raise malformed("expected_output", "larger than what is kept of an output")
        if 2 * expected > limits.output_bytes:  # what is compared must have been kept
            limits = self._runner.limits(timeout_s=limits.timeout_s, output_bytes=2 * expected)
        return checked(
            RunRequest,
            {
                "code": submission.solution,
                "language": submission.type,
                "stdin": submission.input,
                "limits": limits,
                "job": "code-judge",
                "deadline_s": life_s,
            },
        )


def _judgement(submission: Submission, result: RunResult) -> Judgement:
    late = result.outcome in ("timeout", "cpu_timeout") and result.phase == "run"
    ran = result.outcome == "ok"
    matches = submission.expected_output is None or (
        result.stdout.strip() == submission.expected_output.strip()
    )
    stdout = result.stdout[:KEPT_CHARS]
    if late:
        stdout = f"{result.stdout[: KEPT_CHARS - len(_TIMEOUT_LINE) - 1]}\n{_TIMEOUT_LINE}"
    return {
        "sub_id": submission.sub_id or str(uuid4()),
        "success": ran and matches,
        "run_success": ran,
        "cost": 0.0 if result.phase == "compile" else result.wall_ms / 1000,
        "stdout": stdout,
        "stderr": stderr_of(result)[:KEPT_CHARS],
        "reason": "worker_timeout" if late else "",
    }


def _unjudged(submission: Submission, reason: str, cost_s: float) -> Judgement:
    return {
        "sub_id": submission.sub_id or str(uuid4()),
        "success": False,
        "run_success": False,
        "cost": cost_s,
        "stdout": None,
        "stderr": None,
        "reason": reason,
    }


def _without_output(judgement: Judgement) -> Judgement:
    return {name: value for name, value in judgement.items() if name not in ("stdout", "stderr")}


def _judged(answer: Judgement) -> Response:
    results = [_without_output(judgement) for judgement in answer["results"]]
    return JSONResponse({**answer, "results": results})
