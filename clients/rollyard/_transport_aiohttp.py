"""The transport of the extra ``rollyard[aiohttp]``: the same behaviour, less CPU a request."""

import io
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from rollyard._config import Address, ClientConfig
from rollyard._retry import TransportFault
from rollyard._transport import (
    CONNECT_TIMEOUT_S,
    IDLE_CONNECTION_S,
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    Answer,
    request_headers,
)
from rollyard.errors import RollyardError

ONE_WRITE_BYTES = 1 << 19


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:  # pyright: ignore[reportUnknownParameterType]
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


class _AiohttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._headers = {name.lower(): value for name, value in response.headers.items()}

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._headers

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self._response.content.iter_any():
            yield chunk


class AiohttpTransport:
    def __init__(self, config: ClientConfig, address: Address) -> None:
        self._config = config
        self._address = address
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:  # a session must be made inside the loop that uses it
            path = self._address.socket_path
            connector: aiohttp.BaseConnector
            if path:
                connector = aiohttp.UnixConnector(
                    path, limit=0, keepalive_timeout=IDLE_CONNECTION_S
                )
            else:
                connector = aiohttp.TCPConnector(
                    limit=0,  # the coalescer bounds batches
                    keepalive_timeout=IDLE_CONNECTION_S,
                    socket_factory=_keepalive_socket,
                )
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=True,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=1 << 18,
            )
        return self._session

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | None, *, accept: str, read_timeout_s: float
    ) -> AsyncGenerator[Answer, None]:
        try:
            async with self._open().request(
                method,
                self._address.base_url + path,
                # aiohttp warns of large bytes: it would write them in one go.
                data=io.BytesIO(body) if body and len(body) > ONE_WRITE_BYTES else body,
                headers=request_headers(self._config, accept, body),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s
                ),
            ) as response:
                yield _AiohttpAnswer(response)
        except RollyardError:  # what the body of the `async with` raises: some are OSErrors too
            raise
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise TransportFault(_describe(error, method, path), retry=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransportFault(_describe(error, method, path)) from error

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _describe(error: Exception, method: str, path: str) -> str:
    return f"{method} {path}: {type(error).__name__}: {error}".rstrip(": ")
