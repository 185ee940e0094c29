"""The seam between the SDK and an HTTP library: one request out, one streamed answer back."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from typing import Protocol

from rollyard._config import Address, ClientConfig, TransportKind
from rollyard._version import __version__

CONNECT_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 60.0
# Below the 5 s after which uvicorn closes an idle connection: who closes first cannot race.
IDLE_CONNECTION_S = 4.0
# A run may be silent for minutes while it waits; a dead peer must be noticed sooner than that.
# TCP keepalive: first probe after 30 s, then 4 more, 10 s apart.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 4


class Answer(Protocol):
    """A response whose body is still to be read."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]:
        """Names in lower case."""
        ...

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces as they arrive.

        Raises:
            TransportFault: the body broke off, or nothing came for the read time-out.
        """
        ...


class Transport(Protocol):
    """The connections to one gateway, bound to the event loop in which it was first used."""

    def request(
        self, method: str, path: str, body: bytes | None, *, accept: str, read_timeout_s: float
    ) -> AbstractAsyncContextManager[Answer]:
        """Send a request; leaving the context early closes its connection.

        Raises:
            TransportFault: no connection, or no answer.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


def request_headers(config: ClientConfig, accept: str, body: bytes | None) -> dict[str, str]:
    headers = {"accept": accept, "user-agent": f"rollyard-python/{__version__}"}
    if body is not None:
        headers["content-type"] = "application/json"
    if config.api_key:
        headers["authorization"] = f"Bearer {config.api_key}"
    return headers


def transport_class(kind: TransportKind) -> Callable[[ClientConfig, Address], Transport]:
    """Import what the transport needs: not with the SDK, and not amid the first request.

    Raises:
        ImportError: its library is not installed; the message says what to install.
    """
    if kind == "aiohttp":
        if find_spec("aiohttp") is None:
            raise ImportError("transport='aiohttp' needs aiohttp: pip install 'rollyard[aiohttp]'")
        from rollyard._transport_aiohttp import AiohttpTransport

        return AiohttpTransport
    from rollyard._transport_httpx2 import Httpx2Transport

    return Httpx2Transport
