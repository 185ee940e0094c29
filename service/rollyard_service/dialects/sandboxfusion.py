"""SandboxFusion's ``/run_code``, ``/run_jupyter`` and ``/v1/ping``.

Our faults are ``SandboxError`` with status 200, as there; "busy" is 504, the one answer that
verl's reward client tries again: any other becomes a reward of -1 there.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollyard.types import MIB, ErrorResponse, Limits, RunRequest, RunResult
from rollyard_service.dialects.cells import CellsProgram
from rollyard_service.dialects.runner import (
    Busy,
    DialectRunner,
    checked,
    malformed,
    stderr_of,
    template_for,
)
from rollyard_service.dialects.sandboxfusion_requests import (
    RunCodeRequest,
    RunJupyterRequest,
    WithFiles,
)
from rollyard_service.refusal import Refusal

START_WITHIN_S = 15.0
"""A run that no worker started within this is answered 504. verl's client waits 10 s longer than
its two time limits, 30 s by default: it must hear "busy" before it gives up."""
BUSY_RETRY_S = 1.0
SMALLEST_MEMORY_BYTES = 16 * MIB
"""An interpreter needs it; smaller limits are raised to it."""

_SERVED = ("python", "pytest", "cpp", "bash")
_PYTEST_FILE = "test_main.py"
_PYTEST = (
    "import sys, pytest\nsys.exit(pytest.main(['-p', 'no:cacheprovider', {name!r}, *{args!r}]))\n"
)
_COMMON: dict[str, Any] = {"executor_pod_name": None, "files": {}}
_CODE: dict[str, Any] = {"compile_result": None, "run_result": None, **_COMMON}
_NOTEBOOK: dict[str, Any] = {"driver": None, "cells": [], **_COMMON}
"""What an answer holds where nothing is known."""


class SandboxFusionRoutes:
    """Handlers of ``/run_code /run_jupyter /v1/ping``."""

    models = (RunCodeRequest, RunJupyterRequest)

    def __init__(self, runner: DialectRunner) -> None:
        self._runner = runner

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(redirect_slashes=False, tags=["SandboxFusion"])
        router.add_api_route("/v1/ping", self.ping)
        for path, handler, model in (
            ("/run_code", self.run_code, RunCodeRequest),
            ("/run_jupyter", self.run_jupyter, RunJupyterRequest),
        ):
            router.add_api_route(
                path, handler, methods=["POST"], openapi_extra=DialectRunner.documented(model)
            )
        return router

    async def ping(self) -> str:
        """This process answers."""
        return "pong"

    async def run_code(self, request: Request) -> Response:
        """Run one program in the words of SandboxFusion."""
        asked = await self._runner.body(request, RunCodeRequest)
        if asked.language not in _SERVED:
            served = ", ".join(_SERVED)
            message = f"language {asked.language!r} cannot be run here; these can: {served}"
            return _answer(_CODE, status="SandboxError", message=message)
        limits = self._limits(
            asked.memory_limit_MB,
            run_timeout=asked.run_timeout,
            compile_timeout=asked.compile_timeout,
        )
        fields: dict[str, object] = {"code": asked.code, "language": asked.language}
        files: dict[str, object] = {**asked.to_put()}
        if asked.language == "pytest":
            files[_PYTEST_FILE] = asked.code
            fields = {
                "code": _PYTEST.format(name=_PYTEST_FILE, args=asked.args),
                "template": template_for(asked.code),
            }
        result = await self._result(request, asked, fields, files, limits, stdin=asked.stdin)
        if result.is_infra:
            return _fault(_CODE, result)
        return _answer(
            _CODE,
            status="Success" if result.outcome == "ok" else "Failed",
            **_results(result, compiled=asked.language == "cpp"),
            executor_pod_name=result.worker_id,
            files=asked.fetched(result),
        )

    async def run_jupyter(self, request: Request) -> Response:
        """Run the cells of a notebook, one after another, in one new interpreter."""
        asked = await self._runner.body(request, RunJupyterRequest)
        program = CellsProgram(asked.cells, cell_timeout_s=asked.cell_timeout)
        fields: dict[str, object] = {
            "code": program.code,
            "template": template_for("\n".join(asked.cells)),
        }
        limits = self._limits(asked.memory_limit_MB, total_timeout=asked.total_timeout)
        result = await self._result(request, asked, fields, {**asked.to_put()}, limits)
        if result.is_infra:
            return _fault(_NOTEBOOK, result)
        driver = _command(result)
        driver["stdout"] = ""  # all of it is some cell's
        driver["stderr"] = stderr_of(result)[len(result.stderr) :]
        return _answer(
            _NOTEBOOK,
            status="Success" if result.outcome == "ok" else "Failed",
            driver=driver,
            cells=[
                {
                    "stdout": cell.stdout,
                    "stderr": cell.stderr,
                    "display": cell.shown,
                    "error": [] if cell.error is None else [cell.error],
                }
                for cell in program.read(result)
            ],
            executor_pod_name=result.worker_id,
            files=asked.fetched(result),
        )

    def _limits(self, memory_mb: int, **timeouts: float) -> Limits:
        for field, timeout_s in timeouts.items():
            if timeout_s > self._runner.longest_s:
                raise malformed(field, f"the server's maximum is {self._runner.longest_s:g} s")
        wanted, *compiler = timeouts.values()
        named: dict[str, float] = {"timeout_s": wanted}
        if compiler:
            named["compile_timeout_s"] = compiler[0]
        if memory_mb > 0:
            named["memory_bytes"] = max(memory_mb * MIB, SMALLEST_MEMORY_BYTES)
        return self._runner.limits(**named)

    async def _result(
        self,
        request: Request,
        asked: WithFiles,
        fields: dict[str, object],
        files: dict[str, object],
        limits: Limits,
        stdin: str | None = None,
    ) -> RunResult:
        run = checked(
            RunRequest,
            {
                **fields,
                "stdin": stdin,
                "files": files,
                "fetch_files": [posixpath.normpath(path) for path in asked.fetch_files],
                "limits": limits,
                "job": "sandboxfusion",
                "deadline_s": START_WITHIN_S,
            },
        )
        try:
            [result] = await self._runner.results(request, [run])
        except Busy as busy:
            raise _busy(str(busy)) from None
        if result.outcome == "expired":
            raise _busy(f"no worker was free within {START_WITHIN_S:g} s")
        return result


def _busy(message: str) -> Refusal:
    body = ErrorResponse(error="unavailable", message=message, retry_after_s=BUSY_RETRY_S)
    return Refusal(504, body)


def _answer(empty: Mapping[str, Any], *, status: str, message: str = "", **fields: Any) -> Response:
    return JSONResponse({"status": status, "message": message, **empty, **fields})


def _fault(empty: Mapping[str, Any], result: RunResult) -> Response:
    return _answer(empty, status="SandboxError", message=f"{result.outcome}: {result.message}")


def _results(result: RunResult, *, compiled: bool) -> dict[str, Any]:
    if result.phase == "compile":
        return {"compile_result": _command(result), "run_result": None}
    passed = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""}
    return {"compile_result": passed if compiled else None, "run_result": _command(result)}


def _command(result: RunResult) -> dict[str, Any]:
    late = result.outcome in ("timeout", "cpu_timeout")
    code = result.exit_code
    if code is None:  # the memory limit ends a run by SIGKILL, also where that is not known
        code = -(result.signal or 9)
    return {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": result.wall_ms / 1000,
        "cpu_time": result.cpu_ms / 1000,
        "return_code": None if late else code,
        "stdout": result.stdout,
        "stderr": stderr_of(result),
    }
