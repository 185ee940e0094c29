"""The E2B code interpreter's ``/execute``, without contexts: each call has a new interpreter.

``/contexts`` answers 501 and says so: contexts are live interpreters, which need sessions.

The lines come when the run has ended. A fault of ours is an HTTP error, never an event: the
client raises it, and no model reads it.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.types import ErrorResponse, RunRequest, RunResult
from rollyard_service.dialects.cells import Cell, CellsProgram
from rollyard_service.dialects.runner import (
    Busy,
    DialectRunner,
    checked,
    malformed,
    template_for,
)
from rollyard_service.refusal import Refusal, not_found, unavailable

EXECUTION_S = 300.0
"""As long as the client waits by default; it hangs up earlier where it was told to, and that
cancels the run."""
NO_CONTEXTS = (
    "this server has no contexts, for they need sessions, which it does not have yet; "
    "call /execute without context_id: each call has a new interpreter"
)
PYTHON = frozenset({"python", "python3"})

_CONTEXTS = (
    ("POST", "/contexts"),
    ("GET", "/contexts"),
    ("POST", "/contexts/{context_id}/restart"),
    ("DELETE", "/contexts/{context_id}"),
)
_FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/json": "json",
}
_ERRORS = {
    "timeout": "TimeoutError",
    "cpu_timeout": "TimeoutError",
    "memory": "MemoryError",
    "signal": "SignalError",
}


class ExecuteRequest(BaseModel):
    """Body of ``POST /execute``."""

    model_config = ConfigDict(extra="ignore")

    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = Field(default=None)


class E2bRoutes:
    """Handler of ``/execute``."""

    models = (ExecuteRequest,)

    def __init__(self, runner: DialectRunner) -> None:
        self._runner = runner

    def router(self) -> APIRouter:
        """The route."""
        router = APIRouter(redirect_slashes=False, tags=["E2B"])
        router.add_api_route(
            "/execute",
            self.execute,
            methods=["POST"],
            openapi_extra=DialectRunner.documented(ExecuteRequest),
        )
        for method, path in _CONTEXTS:
            router.add_api_route(path, self.contexts, methods=[method], include_in_schema=False)
        return router

    async def contexts(self, request: Request) -> Response:
        """Create, list, restart or delete a context: not here."""
        raise Refusal(501, ErrorResponse(error="not_found", message=NO_CONTEXTS))

    async def execute(self, request: Request) -> Response:
        """Run code as a notebook's cell; events as JSON, one a line."""
        asked = await self._runner.body(request, ExecuteRequest)
        if asked.context_id is not None:
            raise not_found(f"context {asked.context_id[:80]!r} not found: {NO_CONTEXTS}")
        if asked.language is not None and asked.language not in PYTHON:
            raise malformed("language", f"{asked.language!r} cannot be run here; python can")
        program = CellsProgram([asked.code], environment=asked.env_vars)
        run = checked(
            RunRequest,
            {
                "code": program.code,
                "template": template_for(asked.code),
                "limits": self._runner.limits(timeout_s=min(EXECUTION_S, self._runner.longest_s)),
                "job": "e2b",
            },
        )
        try:
            [result] = await self._runner.results(request, [run])
        except Busy as busy:
            raise unavailable(str(busy)) from None
        if result.is_infra:
            raise unavailable(f"{result.outcome}: {result.message}")
        cells = program.read(result) or [Cell()]
        lines = (json.dumps(event) + "\n" for event in _events(cells[0], result))
        return Response("".join(lines), media_type="application/x-ndjson")


def _events(cell: Cell, result: RunResult) -> Iterator[dict[str, Any]]:
    now_ns = time.time_ns()
    yield {"type": "number_of_executions", "execution_count": 1}
    for kind, text in (("stdout", cell.stdout), ("stderr", cell.stderr)):
        if text:
            yield {"type": kind, "text": text, "timestamp": now_ns}
    for bundle in cell.display:
        yield _shown(bundle, is_main_result=False)
    if cell.result is not None:
        yield _shown(cell.result, is_main_result=True)
    if cell.error is not None:
        yield _error(cell.error["ename"], cell.error["evalue"], "".join(cell.error["traceback"]))
    elif result.outcome != "ok":
        name = _ERRORS.get(result.outcome, "SystemExit")
        yield _error(name, result.message, f"{name}: {result.message}")
    yield {"type": "end_of_execution"}


def _error(name: str, value: str, traceback: str) -> dict[str, Any]:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def _shown(bundle: dict[str, Any], *, is_main_result: bool) -> dict[str, Any]:
    formats = {_FORMATS.get(mime, mime): value for mime, value in bundle.items()}
    return {"type": "result", "is_main_result": is_main_result, **formats}
