"""Answers that are not 2xx: one exception, one body shape."""

import math
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from rollyard.types import ErrorResponse, FieldProblem

OUTAGE_RETRY_S = 1.0
"""Retry-After of a 503: Valkey restarts within about a second, and the SDK adds jitter."""

BUSY_IS_504 = frozenset({"/run_code", "/run_jupyter"})
"""Paths of SandboxFusion, wherever in this process the refusal comes from: verl's reward client
tries again on 504 alone, and makes a reward of -1 of any other."""
_BY_STATUS = {429: "job_full", 504: "busy"}
"""What metrics call a refusal; all others by the word in its body."""


class Refusal(Exception):
    """The request is not carried out; ``error`` is the answer's body (its request_id is set late).

    Nothing of the request was queued, or it is not known to have been.
    """

    def __init__(
        self, status: int, error: ErrorResponse, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error
        self.headers = headers or {}

    @property
    def all_headers(self) -> dict[str, str]:
        """The headers, with Retry-After where the body says when to retry."""
        if self.error.retry_after_s is None:
            return self.headers
        # The header holds whole seconds only; the body keeps the precise figure.
        seconds = max(1, math.ceil(self.error.retry_after_s))
        return {**self.headers, "retry-after": str(seconds)}


def invalid(problems: list[FieldProblem]) -> Refusal:
    """422: what is malformed, field by field."""
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    message = f"{first.field or 'body'}: {first.message}{more}"
    return Refusal(422, ErrorResponse(error="invalid_request", message=message, problems=problems))


def too_large(maximum: int) -> Refusal:
    """413: the body has more than ``maximum`` bytes."""
    message = f"the request body is larger than {maximum} bytes (ROLLYARD_MAX_BODY_BYTES)"
    return Refusal(413, ErrorResponse(error="too_large", message=message))


def unauthorized(message: str) -> Refusal:
    """401."""
    error = ErrorResponse(error="unauthorized", message=message)
    return Refusal(401, error, {"www-authenticate": "Bearer"})


def not_found(message: str) -> Refusal:
    """404."""
    return Refusal(404, ErrorResponse(error="not_found", message=message))


def conflict(message: str, places: Iterable[int]) -> Refusal:
    """409: the ids of the runs at these places of the batch belong to other programs."""
    what = "it was given to another program before: one id is one run"
    problems = [FieldProblem(field=f"runs.{place}.run_id", message=what) for place in places]
    message = f"{message}; nothing was queued"
    return Refusal(409, ErrorResponse(error="conflict", message=message, problems=problems))


def overloaded(message: str, retry_after_s: float, *, status: int = 503) -> Refusal:
    """503: there is no room for anybody; or 429: not for this caller, who has its share."""
    return Refusal(
        status, ErrorResponse(error="overloaded", message=message, retry_after_s=retry_after_s)
    )


def unavailable(message: str, retry_after_s: float = OUTAGE_RETRY_S) -> Refusal:
    """503: the queue does not answer, or this process is about to stop."""
    return Refusal(
        503, ErrorResponse(error="unavailable", message=message, retry_after_s=retry_after_s)
    )


def internal() -> Refusal:
    """500: a fault of the gateway; the log has it under the request id."""
    return Refusal(500, ErrorResponse(error="internal", message="internal error of the gateway"))


def from_http_exception(error: HTTPException, scope: Scope) -> Refusal:
    """Give the router's own refusals (404, 405) the common body."""
    if error.status_code == 404:
        refusal = not_found(f"there is no {scope['path']!r} here")
    else:
        message = f"{scope['method']} {scope['path']!r}: {error.detail}"
        body = ErrorResponse(error="invalid_request", message=message)
        refusal = Refusal(error.status_code, body)
    refusal.headers.update(error.headers or {})
    return refusal


def response_to(refusal: Refusal, scope: Scope) -> Response:
    """Build the HTTP answer, with the request's id in its body; ``scope`` keeps the reason."""
    error = refusal.error.model_copy(update={"request_id": scope.get("request_id", "")})
    status = refusal.status
    if status in (429, 503) and scope["path"] in BUSY_IS_504:
        status = 504
    scope["refused_as"] = _BY_STATUS.get(status, error.error)
    return Response(
        error.model_dump_json(),
        status_code=status,
        headers=refusal.all_headers,
        media_type="application/json",
    )


async def on_refusal(request: Request, error: Exception) -> Response:
    """Exception handler for :class:`Refusal`."""
    assert isinstance(error, Refusal)
    return response_to(error, request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for the router's own exceptions."""
    assert isinstance(error, HTTPException)
    return response_to(from_http_exception(error, request.scope), request.scope)
