"""What the API document says about the routes (bodies are validated as bytes, not by FastAPI)."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rollyard.types import (
    RUN_ID_PATTERN,
    BatchRequest,
    BatchResponse,
    ErrorResponse,
    RunRequest,
    RunResult,
)

REF = "#/components/schemas/{model}"

RUN_EXAMPLE: dict[str, Any] = {
    "code": "import sys\nprint(sum(map(int, sys.stdin)))\n",
    "stdin": "1\n2\n",
    "limits": {"timeout_s": 5, "memory_bytes": 268435456},
}
RESULT_EXAMPLE: dict[str, Any] = {
    **RunResult(
        run_id="step-17.group-3.call-1",
        outcome="ok",
        exit_code=0,
        stdout="3\n",
        wall_ms=1.9,
        cpu_ms=1.4,
        peak_memory_bytes=9437184,
        queued_ms=0.8,
        worker_id="worker-1",
        template="bare",
    ).model_dump(mode="json")
}
ERROR_EXAMPLE: dict[str, Any] = {
    "error": "invalid_request",
    "message": "runs.3.limits.timeout_s: Input should be greater than 0",
    "problems": [{"field": "runs.3.limits.timeout_s", "message": "Input should be greater than 0"}],
    "retry_after_s": None,
    "request_id": "5f0c1d3a9b7e4c21a6d8e0f2b4c6d8ea",
}


def _body(model: str, example: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": REF.format(model=model)}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def _answer(description: str, model: str, example: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": REF.format(model=model)}
    return {
        "description": description,
        "content": {"application/json": {"schema": schema, "example": example}},
    }


_RETRY = {"Retry-After": {"description": "Whole seconds to wait.", "schema": {"type": "integer"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    401: _answer("The API key is missing or not accepted.", "ErrorResponse", ERROR_EXAMPLE),
    409: _answer(
        "A run id belongs to another program; nothing was queued.", "ErrorResponse", ERROR_EXAMPLE
    ),
    413: _answer("The body is too large.", "ErrorResponse", ERROR_EXAMPLE),
    422: _answer("Malformed; each field is named.", "ErrorResponse", ERROR_EXAMPLE),
    429: _answer(
        "This job or key has its share; nothing was queued.", "ErrorResponse", ERROR_EXAMPLE
    )
    | {"headers": _RETRY},
    503: _answer("The queue is full, or does not answer.", "ErrorResponse", ERROR_EXAMPLE)
    | {"headers": _RETRY},
}
_WHOLE = _answer(
    "Results in the order of the runs; one per line as they end with Accept: application/x-ndjson.",
    "BatchResponse",
    {"results": [RESULT_EXAMPLE]},
)
_WHOLE["content"]["application/x-ndjson"] = {"schema": {"$ref": REF.format(model="RunResult")}}
_CANCELLED: dict[str, Any] = {
    "description": "The state that the cancellation met.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["run_id", "state"],
                "properties": {
                    "run_id": {"type": "string"},
                    "state": {"enum": ["queued", "running", "done"]},
                },
            },
            "example": {"run_id": "step-17.group-3.call-1", "state": "running"},
        }
    },
}

RUN: dict[str, Any] = {
    "openapi_extra": _body("RunRequest", RUN_EXAMPLE),
    "responses": {200: _answer("How it ended.", "RunResult", RESULT_EXAMPLE), **_ERRORS},
}
BATCH: dict[str, Any] = {
    "openapi_extra": _body("BatchRequest", {"runs": [RUN_EXAMPLE, {"code": "print(1 / 0)"}]}),
    "responses": {200: _WHOLE, **_ERRORS},
}
CANCEL: dict[str, Any] = {
    "openapi_extra": {
        "parameters": [
            {
                "name": "run_id",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "pattern": RUN_ID_PATTERN},
            }
        ]
    },
    "responses": {
        200: _CANCELLED,
        401: _ERRORS[401],
        404: _answer("No such run is known.", "ErrorResponse", ERROR_EXAMPLE),
        503: _ERRORS[503],
    },
}


def add_schemas(app: FastAPI, dialects: Sequence[type[BaseModel]]) -> None:
    """Put the wire types, ours and the dialects', into the app's API document.

    The routes refer to them there.
    """
    models = (RunRequest, BatchRequest, RunResult, BatchResponse, ErrorResponse, *dialects)
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=REF
    )
    document = app.openapi()  # cached by FastAPI; what is changed here is what it serves
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
