"""The routes that tell how this process and its queue are."""

import asyncio

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from rollyard_queue.base import Queue, QueueUnavailable
from rollyard_service.exchange import Exchange
from rollyard_service.load import Load
from rollyard_service.metrics import Metrics
from rollyard_service.refusal import unavailable

ANSWER_S = 2.0
"""Seconds within which the queue must answer for this process to count as ready."""


class ProbeRoutes:
    """Handlers of ``/healthz /readyz /v1/stats /metrics``."""

    def __init__(self, *, queue: Queue, exchange: Exchange, metrics: Metrics, load: Load) -> None:
        self._queue = queue
        self._exchange = exchange
        self._metrics = metrics
        self._load = load

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter()
        router.add_api_route("/healthz", self.healthz)
        router.add_api_route("/readyz", self.readyz)
        router.add_api_route("/v1/stats", self.stats)
        router.add_api_route("/metrics", self.metrics)
        return router

    async def healthz(self) -> Response:
        """This process answers. Never asks the queue: an outage there must not restart us."""
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def readyz(self) -> Response:
        """The queue answers and takes runs; 503 with the reason otherwise."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._queue.ready()
        except (QueueUnavailable, TimeoutError) as error:
            raise unavailable(_reason(error)) from error
        if outage := self._load.outage:
            raise unavailable(outage)
        return Response(b'{"status":"ready"}', media_type="application/json")

    async def stats(self) -> Response:
        """The queue's counts, and the runs that this process has in flight."""
        try:
            async with asyncio.timeout(ANSWER_S):
                stats = await self._queue.stats()
        except (QueueUnavailable, TimeoutError) as error:
            raise unavailable(_reason(error)) from error
        counts = msgspec.to_builtins(stats) | {"in_flight": len(self._exchange)}
        return Response(msgspec.json.encode(counts), media_type="application/json")

    async def metrics(self) -> Response:
        """Prometheus metrics of this process, and of the queue if it answers."""
        try:
            async with asyncio.timeout(ANSWER_S):
                stats = await self._queue.stats()
        except (QueueUnavailable, TimeoutError):
            stats = None
        return Response(self._metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


def _reason(error: Exception) -> str:
    return str(error) or f"the queue did not answer within {ANSWER_S:g} s"
