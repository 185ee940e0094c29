"""What every HTTP request passes first: an id, the key, a count, and a net for our own faults."""

import itertools
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard_service.admission import Admission
from rollyard_service.body import HeldBody
from rollyard_service.keys import ApiKeys
from rollyard_service.metrics import Metrics
from rollyard_service.origin import from_foreign_page
from rollyard_service.refusal import Refusal, internal, response_to, unauthorized

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Answered without a key: probes of an orchestrator have none."""

CLIENT_GONE = 499
"""Status in metrics for a caller that went away; nobody receives it."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")

logger = logging.getLogger(__name__)


type Headers = Mapping[bytes, bytes]
"""By name in small letters; of one that is there twice the last."""
type Handler = Callable[[Scope, Headers, Receive, Send], Awaitable[None]]
"""Serves one route; may raise Refusal and ClientDisconnect before it has sent anything."""


class FrontDoor:
    """ASGI application around the whole other one."""

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys, metrics: Metrics, admission: Admission,
        direct: Mapping[str, Handler],
    ) -> None:  # fmt: skip
        """``direct`` has the handlers of POST requests that need not go through ``app``."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._admission = admission
        self._direct = direct
        # Unique, and no secret: a prefix of this process and a number cost less than chance does.
        self._id_prefix = os.urandom(10).hex().encode()
        self._numbers = itertools.count()

    def _next_id(self) -> bytes:
        return b"%b%012x" % (self._id_prefix, next(self._numbers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = dict[bytes, bytes](scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else self._next_id()
        scope["request_id"] = request_id.decode()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        direct = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
        body = HeldBody(self._admission, headers, receive)
        try:
            await self._serve(direct, scope, headers, body, answer)
        except Refusal as refusal:
            await response_to(refusal, scope)(scope, receive, answer)
        except ClientDisconnect:
            pass
        except Exception:
            logger.exception("request.failed", extra={"request_id": scope["request_id"]})
            if not status:
                await response_to(internal(), scope)(scope, receive, answer)
        finally:
            body.release()
            route = scope["path"] if direct else getattr(scope.get("route"), "path", "none")
            self._metrics.count_request(
                _known_method(scope["method"]),
                route,
                status or CLIENT_GONE,
                refused_as=scope.get("refused_as"),
            )

    async def _serve(
        self, direct: Handler | None, scope: Scope, headers: Headers, body: HeldBody, send: Send
    ) -> None:
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            raise refusal
        receive = body.held()
        scope["body_bytes"] = body.size
        if direct is not None:
            await direct(scope, headers, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        if scope["path"] in OPEN_PATHS:
            return None
        if len(self._keys):
            # E2B's clients send theirs in a header of their own.
            scope["api_key"] = self._keys.accepted(
                headers.get(b"authorization", b"")
            ) or self._keys.accepted_key(headers.get(b"x-access-token", b""))
            if scope["api_key"]:
                return None
            return unauthorized("send an accepted key as 'Authorization: Bearer <key>'")
        origin = headers.get(b"origin")
        host = headers.get(b"host", b"").decode("latin-1")
        if origin is not None and from_foreign_page(origin.decode("latin-1"), host):
            return unauthorized("pages of other sites may not use a gateway that has no API keys")
        return None


def _known_method(method: str) -> str:
    # A label must not take whatever a caller invents.
    return method if method in ("GET", "POST", "DELETE", "HEAD", "PUT", "OPTIONS") else "other"
