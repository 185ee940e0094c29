"""The routes that run programs."""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollyard.types import RUN_ID_PATTERN
from rollyard_queue.base import Queue, QueueFull, QueueUnavailable, RunIdTaken
from rollyard_service import openapi
from rollyard_service.admission import Admission
from rollyard_service.body import read_body
from rollyard_service.call import Call
from rollyard_service.exchange import Exchange
from rollyard_service.frontdoor import CLIENT_GONE, Handler, Headers
from rollyard_service.intake import AcceptedRun, Intake
from rollyard_service.refusal import Refusal, conflict, not_found, overloaded, unavailable
from rollyard_service.shares import Shares
from rollyard_service.stream import NDJSON, ResultStream, whole

ANSWER_S = 4.0
"""Seconds within which the queue must answer a cancellation."""

_RUN_ID = re.compile(RUN_ID_PATTERN)

logger = logging.getLogger(__name__)


class RunRoutes:
    """Handlers of ``/v1/runs`` and ``/v1/batches``."""

    def __init__(
        self,
        *,
        queue: Queue,
        exchange: Exchange,
        intake: Intake,
        admission: Admission,
        shares: Shares,
        max_body_bytes: int,
    ) -> None:
        self._queue = queue
        self._exchange = exchange
        self._intake = intake
        self._admission = admission
        self._shares = shares
        self._max_body_bytes = max_body_bytes

    def router(self) -> APIRouter:
        """The routes, documented for OpenAPI; those of direct() are there for that and for 405."""
        router = APIRouter(redirect_slashes=False)
        add: Callable[..., Any] = router.add_api_route
        add("/v1/runs", _never_reached, methods=["POST"], name="run", **openapi.RUN)
        add("/v1/batches", _never_reached, methods=["POST"], name="batch", **openapi.BATCH)
        add("/v1/runs/{run_id}", self.cancel, methods=["DELETE"], **openapi.CANCEL)
        return router

    def direct(self) -> dict[str, Handler]:
        """Handlers of POST that the front door calls itself: FastAPI's way takes 100 µs more."""
        return {"/v1/runs": self.run, "/v1/batches": self.batch}

    async def run(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Run one program and wait for its result."""
        key = scope.get("api_key", b"")
        run = self._intake.run(await self._body(scope, headers, receive))
        with self._shares.taken(key, 1):
            call = await self._submitted([run])
            results = await whole(receive, self._exchange, call)
        for result in results:
            await _send_json(send, result)

    async def batch(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Run many programs; one answer when all have ended, or a line for each as it ends."""
        key = scope.get("api_key", b"")
        runs = self._intake.batch(await self._body(scope, headers, receive))
        with self._shares.taken(key, len(runs)):
            if NDJSON in headers.get(b"accept", b""):
                call = await self._submitted(runs, streamed=True)
                await ResultStream(self._exchange, call)(scope, receive, send)
                return
            results = await whole(receive, self._exchange, await self._submitted(runs))
        if results:
            # They are valid JSON already: parsing them again would cost more than the rest.
            await _send_json(send, b'{"results":[' + b",".join(results) + b"]}")

    async def cancel(self, request: Request) -> Response:
        """End a queued or running run with outcome ``cancelled``; all who wait for it get that."""
        run_id: str = request.path_params["run_id"]
        if not _RUN_ID.fullmatch(run_id):
            raise not_found("that is not the id of a run")
        try:
            async with asyncio.timeout(ANSWER_S):  # late, the cancellation still takes place
                [state] = await self._queue.cancel([run_id])
        except (QueueUnavailable, TimeoutError) as error:
            raise _outage(error) from error
        if state == "unknown":
            raise not_found(f"run {run_id} is unknown: never submitted, or forgotten since")
        return _json(b'{"run_id":"%b","state":"%b"}' % (run_id.encode(), state.encode()))

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        self._shares.check(scope.get("api_key", b""))
        self._admission.check(scope["body_bytes"])
        return await read_body(headers, receive, max_bytes=self._max_body_bytes)

    async def _submitted(self, runs: Sequence[AcceptedRun], *, streamed: bool = False) -> Call:
        call = Call(runs, now=asyncio.get_running_loop().time(), streamed=streamed)
        try:
            await self._exchange.submit(call)
        except QueueFull as error:
            message = f"{error}; nothing was queued"
            status = 429 if error.job else 503  # the job has its share, or nobody gets any more
            raise overloaded(message, error.retry_after_s, status=status) from None
        except RunIdTaken as error:
            places = [call.run_ids.index(run_id) for run_id in error.run_ids]
            raise conflict(str(error), places) from None
        except QueueUnavailable as error:
            raise _outage(error) from error
        return call


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _outage(error: Exception) -> Refusal:
    logger.warning("queue.unavailable", extra={"reason": str(error)})
    return unavailable(str(error) or f"the queue did not answer within {ANSWER_S:g} s")


async def _never_reached() -> Response:
    raise NotImplementedError("the front door serves this route")


async def on_client_disconnect(request: Request, error: Exception) -> Response:
    """Exception handler for a caller that went away while it sent its body."""
    return Response(status_code=CLIENT_GONE)
