"""The settings of a client: everything that survives pickling, and nothing else."""

import os
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

TransportKind = Literal["httpx2", "aiohttp"]

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_BATCH_MAX_RUNS = 64
DEFAULT_BATCH_MAX_DELAY_S = 0.002
# A streamed batch holds its connection until its slowest run ends, so this times the batch size
# bounds the runs in flight (16,384). Connections are opened only when needed.
DEFAULT_MAX_CONNECTIONS = 256
# 8 retries wait 10 to 20 s in all: longer than a gateway needs to restart.
DEFAULT_MAX_RETRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Where the service is and how to talk to it. Made by :func:`make_config`."""

    base_url: str
    """``http(s)://host[:port][/prefix]``, without a slash at the end."""
    socket_path: str | None
    """Unix socket to connect to instead of the host of ``base_url``."""
    api_key: str | None
    job: str
    timeout_s: float | None
    max_retries: int
    batch_max_runs: int
    batch_max_delay_s: float
    max_connections: int
    transport: TransportKind

    def __repr__(self) -> str:
        # The key must not reach a log through a traceback or a notebook cell.
        where = f"unix://{self.socket_path}" if self.socket_path else self.base_url
        return f"{where!r}, job={self.job!r}, transport={self.transport!r}"


def make_config(
    base_url: str | None,
    *,
    api_key: str | None,
    job: str,
    timeout_s: float | None,
    max_retries: int,
    batch_max_runs: int,
    batch_max_delay_s: float,
    max_connections: int,
    transport: TransportKind,
) -> ClientConfig:
    """Check the settings and fill in what the environment says.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """
    url, socket_path = _parse_url(base_url or os.environ.get("ROLLYARD_URL") or DEFAULT_URL)
    key = api_key if api_key is not None else os.environ.get("ROLLYARD_API_KEY")
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError("api_key must be printable ASCII: it travels in a header")
    for name, ok, wanted in (
        ("timeout_s", timeout_s is None or timeout_s > 0, "positive or None"),
        ("max_retries", max_retries >= 0, "0 or more"),
        ("batch_max_runs", 1 <= batch_max_runs <= 1024, "1 to 1024"),
        ("batch_max_delay_s", 0 <= batch_max_delay_s <= 1, "0 to 1 s"),
        ("max_connections", max_connections >= 1, "1 or more"),
        ("transport", transport in get_args(TransportKind), "'httpx2' or 'aiohttp'"),
    ):
        if not ok:
            raise ValueError(f"{name} must be {wanted}")
    return ClientConfig(
        base_url=url,
        socket_path=socket_path,
        api_key=key or None,
        job=job,
        timeout_s=timeout_s,
        max_retries=max_retries,
        batch_max_runs=batch_max_runs,
        batch_max_delay_s=batch_max_delay_s,
        max_connections=max_connections,
        transport=transport,
    )


def _parse_url(text: str) -> tuple[str, str | None]:
    parts = urlsplit(text)
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError("base_url: a unix URL is unix:///absolute/path/to.sock")
        return "http://localhost", unquote(parts.path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("base_url must be http://…, https://… or unix:///path/to.sock")
    if parts.query or parts.fragment:
        raise ValueError("base_url must not have a query or a fragment")
    return text.rstrip("/"), None
