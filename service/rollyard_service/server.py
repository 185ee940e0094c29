"""The HTTP server around the application: listening, signals, and an orderly end."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
from collections.abc import Generator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rollyard._ports import free_ports
from rollyard_service.settings import GatewaySettings

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: whoever closes first decides who sees a reset."""
LAST_ANSWERS_S = 5
"""Seconds after the grace for the answers that say that the gateway stops."""
BACKLOG = 4096
"""Connections that wait to be accepted: a training step opens its connections all at once."""

logger = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """Serves until SIGINT or SIGTERM, then finishes what is in flight.

    New connections are refused at once. After ``shutdown_grace_s`` each request still in flight
    is answered 503, or its stream is cut; its runs go on, and a caller that sends their ids again
    joins them. A second SIGINT ends the process without that.

    Raises:
        CannotListen: (when made) the port is taken, or the address is not this machine's.
    """

    def __init__(self, app: FastAPI, settings: GatewaySettings) -> None:
        if settings.uds is None:
            free_ports(settings.host, [settings.port])  # uvicorn would say Errno 98, too late
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                uds=None if settings.uds is None else str(settings.uds),
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="on",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(settings.shutdown_grace_s) + LAST_ANSWERS_S,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                log_config=None,
            )
        )
        self._app = app
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                name = listener.getsockname()
                where = f"http://{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)
                logger.info("gateway.listening", extra={"address": where, "pid": os.getpid()})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests in flight end, within the grace."""
        grace_s = self._settings.shutdown_grace_s
        exchange = self._app.state.exchange
        logger.info("gateway.stopping", extra={"in_flight": len(exchange), "grace_s": grace_s})
        timer = asyncio.get_running_loop().call_later(grace_s, exchange.stop_calls)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
        logger.info("gateway.stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take SIGINT and SIGTERM as a request to end well (uvicorn would die of them after)."""
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)


def prepare_socket_path(path: Path) -> None:
    """Make ``path`` ready for uvicorn to listen on, reachable by this user only.

    uvicorn opens a new socket to everybody, but keeps the mode of one that is there; so a closed
    one with mode 0600 is left there.

    Raises:
        OSError: something else has that name, or a process listens there.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError(f"{path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
            probe.connect(str(path))
            raise OSError(f"another process listens on {path}")
        path.unlink()
    before = os.umask(0o177)
    try:
        with socket.socket(socket.AF_UNIX) as placeholder:
            placeholder.bind(str(path))
    finally:
        os.umask(before)
