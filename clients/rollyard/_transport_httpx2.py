"""The default transport."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import httpx2

from rollyard._config import Address, ClientConfig
from rollyard._retry import TransportFault
from rollyard._transport import (
    CONNECT_TIMEOUT_S,
    IDLE_CONNECTION_S,
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    WRITE_TIMEOUT_S,
    Answer,
    request_headers,
)

# Measured with 256 connections, CPU a run in batches that callers in closed loops form: one pool
# 81 to 95 us, pools of 16 38 to 47 us, pools of 1 36 to 55 us.
SHARD_CONNECTIONS = 16


def _socket_options() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # TCP_KEEPIDLE has another name on macOS
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


class _Httpx2Answer:
    def __init__(self, response: httpx2.Response) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status_code

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        # Faults of the body are mapped where the request's are: in request(), around both.
        async for chunk in self._response.aiter_bytes():
            yield chunk


class _Shard:
    """One pool, and how many requests are in it."""

    def __init__(self, address: Address, ssl_context: ssl.SSLContext) -> None:
        self.busy = 0
        self.client = httpx2.AsyncClient(
            base_url=address.base_url,
            follow_redirects=False,
            trust_env=False,
            transport=httpx2.AsyncHTTPTransport(
                verify=ssl_context,
                uds=address.socket_path,
                limits=httpx2.Limits(
                    # The coalescer bounds batches; cancels and stats must not wait behind them.
                    max_connections=None,
                    max_keepalive_connections=None,
                    keepalive_expiry=IDLE_CONNECTION_S,
                ),
                socket_options=None if address.socket_path else _socket_options(),
            ),
        )


class Httpx2Transport:
    """Fills one small pool after the other: a pool's cost a request grows with its connections."""

    def __init__(self, config: ClientConfig, address: Address) -> None:
        self._config = config
        self._address = address
        self._ssl_context: asyncio.Future[ssl.SSLContext] | None = None
        self._shards: list[_Shard] = []

    async def _shard(self) -> _Shard:
        for shard in self._shards:
            if shard.busy < SHARD_CONNECTIONS:
                return shard
        if not self._address.base_url.startswith("https:"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        else:
            # Loading the authorities takes 70 ms: once for all pools, and not in the loop's thread.
            if self._ssl_context is None:
                self._ssl_context = asyncio.ensure_future(
                    asyncio.to_thread(httpx2.create_ssl_context)
                )
            context = await asyncio.shield(self._ssl_context)
        self._shards.append(_Shard(self._address, context))
        return self._shards[-1]

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | None, *, accept: str, read_timeout_s: float
    ) -> AsyncGenerator[Answer, None]:
        shard = await self._shard()
        shard.busy += 1
        try:
            async with shard.client.stream(
                method,
                path,
                content=body,
                headers=request_headers(self._config, accept, body),
                timeout=httpx2.Timeout(
                    connect=CONNECT_TIMEOUT_S,
                    read=read_timeout_s,
                    write=WRITE_TIMEOUT_S,
                    pool=None,
                ),
            ) as response:
                yield _Httpx2Answer(response)
        except (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError) as error:
            raise TransportFault(_describe(error, method, path), retry=False) from error
        except httpx2.HTTPError as error:
            raise TransportFault(_describe(error, method, path)) from error
        finally:
            shard.busy -= 1

    async def aclose(self) -> None:
        shards, self._shards = self._shards, []
        for shard in shards:
            await shard.client.aclose()


def _describe(error: httpx2.HTTPError, method: str, path: str) -> str:
    return f"{method} {path}: {type(error).__name__}: {error}".rstrip(": ")
