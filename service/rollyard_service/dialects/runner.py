"""Runs for the dialects: requests of ours in, results out, on top of the exchange."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from rollyard.types import MIB, FieldProblem, Limits, RunRequest, RunResult, Template
from rollyard_queue.base import QueueFull, QueueUnavailable
from rollyard_service.body import read_body
from rollyard_service.call import Call
from rollyard_service.exchange import Exchange
from rollyard_service.intake import Intake, problems_of
from rollyard_service.refusal import Refusal, invalid
from rollyard_service.stream import whole

MEMORY_BYTES = 1024 * MIB
"""For those who name no limit; a rollout's libraries and data fit."""
OUTPUT_BYTES = 1 << 20
"""Kept of each stream; SandboxFusion keeps as much."""

_SCIENCE = ("numpy", "scipy", "sympy", "pandas", "networkx")


class Busy(Exception):
    """No result can be had now: the queue is full or does not answer, or this process stops."""


class DialectRunner:
    """What every dialect needs of the gateway."""

    def __init__(self, *, exchange: Exchange, intake: Intake, max_body_bytes: int) -> None:
        self._exchange = exchange
        self._intake = intake
        self._max_body_bytes = max_body_bytes

    async def body[M: BaseModel](self, request: Request, model: type[M]) -> M:
        """Read a request of a dialect: unknown fields are ignored, types are converted.

        Raises:
            Refusal: 413, or 422 with every malformed field named.
        """
        headers = dict[bytes, bytes](request.scope["headers"])
        body = await read_body(headers, request.receive, max_bytes=self._max_body_bytes)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise invalid(problems_of(error)) from None  # the original quotes the caller's input

    async def results(self, request: Request, runs: Sequence[RunRequest]) -> list[RunResult]:
        """Run at most 1024 requests; results in order.

        A caller that goes away has its runs cancelled.

        Raises:
            Busy: nothing is known of any of the runs.
            Refusal: 422, a limit is above the server's maximum.
            ClientDisconnect: the caller went away.
        """
        accepted = self._intake.accept(runs)
        call = Call(accepted, now=asyncio.get_running_loop().time())
        try:
            await self._exchange.submit(call)
        except QueueFull as error:
            raise Busy("the queue is full") from error
        except QueueUnavailable as error:
            raise Busy("the queue does not answer") from error
        try:
            answers = await whole(request.receive, self._exchange, call)
        except Refusal as refusal:
            raise Busy(refusal.error.message) from None
        if not answers:
            raise ClientDisconnect
        return [RunResult.model_validate_json(answer) for answer in answers]

    @property
    def longest_s(self) -> float:
        """The server's maximum for a run's wall clock."""
        return self._intake.ceilings.timeout_s

    @property
    def largest_output_bytes(self) -> int:
        """The server's maximum for what is kept of a stream."""
        return self._intake.ceilings.output_bytes

    def limits(self, **named: float) -> Limits:
        """Limits with those named, and the others as far as the server allows.

        Raises:
            Refusal: 422, a named one is out of range.
        """
        ceilings = self._intake.ceilings
        usual = Limits()
        return checked(
            Limits,
            {
                "memory_bytes": min(MEMORY_BYTES, ceilings.memory_bytes),
                "disk_bytes": min(usual.disk_bytes, ceilings.disk_bytes),
                "pids": min(usual.pids, ceilings.pids),
                "output_bytes": min(OUTPUT_BYTES, ceilings.output_bytes),
                **named,
            },
        )

    @staticmethod
    def documented(model: type[BaseModel]) -> dict[str, Any]:
        """What the API document says of a route that takes ``model``."""
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        return {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }


def checked[M: BaseModel](model: type[M], fields: dict[str, object]) -> M:
    """Build one of our models from a dialect's values.

    Raises:
        Refusal: 422; the field is named in our words.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid(problems_of(error)) from None


def malformed(field: str, message: str) -> Refusal:
    """422 for one field."""
    return invalid([FieldProblem(field=field, message=message)])


def template_for(source: str) -> Template:
    """A guess for code that the worker does not see as such; a wrong one is only slower."""
    return "science" if any(name in source for name in _SCIENCE) else "auto"


def stderr_of(result: RunResult) -> str:
    """What the program said, and why it has no more to say if a limit ended it."""
    if result.outcome != "memory":
        return result.stderr
    gap = "" if not result.stderr or result.stderr.endswith("\n") else "\n"
    return f"{result.stderr}{gap}Killed: {result.message}\n"
