"""The bodies of SandboxFusion's requests, and their files in our words."""

import base64
import binascii
import posixpath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollyard.types import RunResult
from rollyard_service.dialects.runner import malformed

Language = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript",
    "sql", "rust", "cuda", "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit",
    "kotlin_script", "jest", "verilog", "python_gpu", "lean", "swift", "racket", "python2", "gtest",
    "react", "js", "ts",
]  # fmt: skip

_IGNORED_FILE = "IGNORE_THIS_FILE"

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class WithFiles(BaseModel):
    """Files that go in, and those that are asked for."""

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


class RunCodeRequest(WithFiles):
    """Body of ``POST /run_code``. Unlike there, ``language`` has a default."""

    code: str
    language: Language = "python"
    compile_timeout: _Seconds = 10.0
    run_timeout: _Seconds = 10.0
    memory_limit_MB: int = -1
    stdin: str | None = None
    args: list[str] = Field(default_factory=list)
    """More arguments for pytest."""


class RunJupyterRequest(WithFiles):
    """Body of ``POST /run_jupyter``."""

    cells: list[str]
    cell_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds for each cell, 0: no limit but the total."""
    total_timeout: _Seconds = 45.0
    memory_limit_MB: int = -1
    kernel: Literal["python3"] = "python3"
