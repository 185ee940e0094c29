"""The settings of a client: everything that survives pickling, and nothing else."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

TransportKind = Literal["httpx2", "aiohttp"]

DEFAULT_URL = "http://127.0.0.1:8000"
# 64 fill a request; more travel in one only where many wait.
DEFAULT_BATCH_MAX_RUNS = 512
DEFAULT_BATCH_MAX_DELAY_S = 0.002
# A streamed batch holds its connection until its slowest run ends. Connections are opened only
# when needed.
DEFAULT_MAX_CONNECTIONS = 256
DEFAULT_MAX_RETRIES: int | None = None  # time decides: see _patience


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway is."""

    base_url: str
    """``http(s)://host[:port][/prefix]``, without a slash at the end."""
    socket_path: str | None = None
    """Unix socket to connect to instead of the host of ``base_url``."""

    def __str__(self) -> str:
        return f"unix://{self.socket_path}" if self.socket_path else self.base_url


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Where the service is and how to talk to it. Made by :func:`make_config`."""

    gateways: tuple[Address, ...]
    api_key: str | None
    job: str
    timeout_s: float | None
    max_retries: int | None
    batch_max_runs: int
    batch_max_delay_s: float
    max_connections: int
    transport: TransportKind

    def __repr__(self) -> str:
        # The key must not reach a log through a traceback or a notebook cell.
        where = ",".join(str(address) for address in self.gateways)
        return f"{where!r}, job={self.job!r}, transport={self.transport!r}"


def make_config(
    base_url: str | Sequence[str] | None,
    *,
    api_key: str | None,
    job: str,
    timeout_s: float | None,
    max_retries: int | None,
    batch_max_runs: int,
    batch_max_delay_s: float,
    max_connections: int,
    transport: TransportKind,
) -> ClientConfig:
    """Check the settings and fill in what the environment says.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """
    gateways = _parse_urls(base_url or os.environ.get("ROLLYARD_URL") or DEFAULT_URL)
    key = api_key if api_key is not None else os.environ.get("ROLLYARD_API_KEY")
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError("api_key must be printable ASCII: it travels in a header")
    for name, ok, wanted in (
        ("timeout_s", timeout_s is None or timeout_s > 0, "positive or None"),
        ("max_retries", max_retries is None or max_retries >= 0, "0 or more, or None"),
        ("batch_max_runs", 1 <= batch_max_runs <= 1024, "1 to 1024"),
        ("batch_max_delay_s", 0 <= batch_max_delay_s <= 1, "0 to 1 s"),
        ("max_connections", max_connections >= 1, "1 or more"),
        ("transport", transport in get_args(TransportKind), "'httpx2' or 'aiohttp'"),
    ):
        if not ok:
            raise ValueError(f"{name} must be {wanted}")
    return ClientConfig(
        gateways=gateways,
        api_key=key or None,
        job=job,
        timeout_s=timeout_s,
        max_retries=max_retries,
        batch_max_runs=batch_max_runs,
        batch_max_delay_s=batch_max_delay_s,
        max_connections=max_connections,
        transport=transport,
    )


def _parse_urls(given: str | Sequence[str]) -> tuple[Address, ...]:
    texts = given.split(",") if isinstance(given, str) else given
    # In the order given, each once: the same gateway twice would get twice the share.
    return tuple(dict.fromkeys(_parse_url(text.strip()) for text in texts))


def _parse_url(text: str) -> Address:
    parts = urlsplit(text)
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError("base_url: a unix URL is unix:///absolute/path/to.sock")
        return Address("http://localhost", unquote(parts.path))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("base_url must be http://…, https://… or unix:///path/to.sock")
    if parts.query or parts.fragment:
        raise ValueError("base_url must not have a query or a fragment")
    return Address(text.rstrip("/"))
