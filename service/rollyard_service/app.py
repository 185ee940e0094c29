"""The application: everything of one gateway process put together."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rollyard import __version__
from rollyard_queue.base import Queue, QueueUnavailable
from rollyard_service import openapi
from rollyard_service.admission import Admission
from rollyard_service.dialects.codejudge import CodeJudgeRoutes
from rollyard_service.dialects.e2b import E2bRoutes
from rollyard_service.dialects.runner import DialectRunner
from rollyard_service.dialects.sandboxfusion import SandboxFusionRoutes
from rollyard_service.exchange import Exchange
from rollyard_service.frontdoor import FrontDoor
from rollyard_service.intake import Intake
from rollyard_service.keys import ApiKeys
from rollyard_service.load import Load
from rollyard_service.metrics import Metrics
from rollyard_service.probes import ProbeRoutes
from rollyard_service.refusal import Refusal, on_http_exception, on_refusal
from rollyard_service.routes import RunRoutes, on_client_disconnect
from rollyard_service.settings import GatewaySettings
from rollyard_service.shares import Shares


class Gateway(FastAPI):
    """FastAPI behind a front door, through which every request goes first."""

    front_door: FrontDoor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front_door(scope, receive, send)


def create_app(settings: GatewaySettings, queue: Queue) -> Gateway:
    """Build the gateway. It uses ``queue`` while its lifespan runs, and closes it at the end.

    ``app.state.exchange`` is the process's :class:`Exchange`; call its stop_calls() to have
    everything in flight answered at once.

    Raises:
        OSError, ValueError: the API keys cannot be read.
    """
    metrics = Metrics(
        in_flight=lambda: float(len(exchange)),
        held_bytes=lambda: float(admission.held_bytes),
        max_queued=settings.max_queued,
        max_queued_bytes=settings.max_queued_bytes,
        max_held_bytes=settings.max_held_bytes,
    )
    load = Load(queue)
    admission = Admission(
        load,
        max_queued=settings.max_queued,
        max_queued_bytes=settings.max_queued_bytes,
        max_queued_wait_s=settings.max_queued_wait_s,
        max_held_bytes=settings.max_held_bytes,
        max_body_bytes=settings.max_body_bytes,
    )
    exchange = Exchange(queue, metrics=metrics, load=load)
    keys = ApiKeys.from_settings(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        exchange.start()
        load.start()
        try:
            yield
        finally:
            await load.close()
            await exchange.close()
            with suppress(QueueUnavailable):  # its last word to a queue that is gone
                await queue.close()

    app = Gateway(
        title="Rollyard",
        version=__version__,
        summary="Runs the Python that RL rollouts write: jailed, batched, and told truthfully.",
        lifespan=lifespan,
        # FastAPI's pages for these take their scripts from other people's servers.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.exchange = exchange
    intake = Intake(
        ceilings=settings.ceilings, max_wait_s=settings.max_wait_s, slack_s=settings.slack_s
    )
    runs = RunRoutes(
        queue=queue,
        exchange=exchange,
        intake=intake,
        admission=admission,
        shares=Shares(load, max_in_flight_per_key=settings.max_in_flight_per_key),
        max_body_bytes=settings.max_body_bytes,
    )
    app.include_router(runs.router())
    runner = DialectRunner(exchange=exchange, intake=intake, max_body_bytes=settings.max_body_bytes)
    dialects = (SandboxFusionRoutes(runner), CodeJudgeRoutes(runner, queue), E2bRoutes(runner))
    for dialect in dialects:
        app.include_router(dialect.router())
    app.include_router(
        ProbeRoutes(queue=queue, exchange=exchange, metrics=metrics, load=load).router()
    )
    app.add_exception_handler(Refusal, on_refusal)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_client_disconnect)
    inner = partial(FastAPI.__call__, app)
    app.front_door = FrontDoor(
        inner, keys=keys, metrics=metrics, admission=admission, direct=runs.direct()
    )
    openapi.add_schemas(app, [model for dialect in dialects for model in dialect.models])
    return app
