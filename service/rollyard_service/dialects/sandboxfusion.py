"""SandboxFusion's ``/run_code``, ``/run_jupyter`` and ``/v1/ping``.

Our faults are ``SandboxError`` with status 200, as there; "busy" is 504, the one answer that
verl's reward client tries again: any other becomes a reward of -1 there.
"""

import base64
import binascii
import posixpath
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
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
from rollyard_service.refusal import Refusal

START_WITHIN_S = 15.0
"""A run that no worker started within this is answered 504. verl's client waits 10 s longer than
its two time limits, 30 s by default: it must hear "busy" before it gives up."""
BUSY_RETRY_S = 1.0
SMALLEST_MEMORY_BYTES = 16 * MIB
"""An interpreter needs it; smaller limits are raised to it."""

Language = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript",
    "sql", "rust", "cuda", "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit",
    "kotlin_script", "jest", "verilog", "python_gpu", "lean", "swift", "racket", "python2", "gtest",
    "react", "js", "ts",
]  # fmt: skip
_SERVED = ("python", "pytest", "cpp", "bash")
_IGNORED_FILE = "IGNORE_THIS_FILE"
_PYTEST_FILE = "test_main.py"
_PYTEST = (
    "import sys, pytest\nsys.exit(pytest.main(['-p', 'no:cacheprovider', {name!r}, *{args!r}]))\n"
)

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Files(BaseModel):
    model_config = ConfigDict(extra="ignore")

    files: dict[str, str | None] = Field(default_factory=dict)
    """Path to base64; null is skipped."""
    fetch_files: list[str] = Field(default_factory=list)

    def to_put(self) -> dict[str, dict[str, str]]:
        """The files in our words.

        Raises:
            Refusal: 422, a content is not base64.
        """
        put: dict[str, dict[str, str]] = {}
        for path, content in self.files.items():
            if content is None or _IGNORED_FILE in path:
                continue
            try:
                data = base64.b64decode(content)
            except (binascii.Error, ValueError) as error:
                raise malformed(f"files.{path}", f"not base64: {error}") from None
            put[posixpath.normpath(path)] = {"base64": base64.b64encode(data).decode()}
        return put

    def fetched(self, result: RunResult) -> dict[str, str]:
        """What came back, by the names that were asked for."""
        return {
            path: base64.b64encode(result.file_bytes(name)).decode()
            for path in self.fetch_files
            if (name := posixpath.normpath(path)) in result.files
        }


class RunCodeRequest(_Files):
    """Body of ``POST /run_code``. Unlike there, ``language`` has a default."""

    code: str
    language: Language = "python"
    compile_timeout: _Seconds = 10.0
    run_timeout: _Seconds = 10.0
    memory_limit_MB: int = -1
    stdin: str | None = None
    args: list[str] = Field(default_factory=list)
    """More arguments for pytest."""


class RunJupyterRequest(_Files):
    """Body of ``POST /run_jupyter``."""

    cells: list[str]
    cell_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds for each cell, 0: no limit but the total."""
    total_timeout: _Seconds = 45.0
    memory_limit_MB: int = -1
    kernel: Literal["python3"] = "python3"


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
            return _answer(
                status="SandboxError",
                message=f"language {asked.language!r} cannot be run here; these can:"
                f" {', '.join(_SERVED)}",
            )
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
            return _fault(result)
        return _answer(
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
            return _fault(result)
        driver = _command(result)
        driver["stdout"] = ""  # all of it is some cell's
        driver["stderr"] = stderr_of(result)[len(result.stderr) :]
        return _answer(
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
        asked: _Files,
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


def _answer(*, status: str, message: str = "", **fields: Any) -> Response:
    return JSONResponse({"status": status, "message": message, "files": {}, **fields})


def _fault(result: RunResult) -> Response:
    return _answer(status="SandboxError", message=f"{result.outcome}: {result.message}")


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
