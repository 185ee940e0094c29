"""What one gateway process can be told, and its checks (read once, by the entry point)."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rollyard.types import MIB
from rollyard_service.ceilings import Ceilings
from rollyard_service.logs import LogFormat
from rollyard_service.origin import is_loopback

GIB = 1024 * MIB


class GatewaySettings(BaseSettings):
    """Settings of ``python -m rollyard_service``; each is ``ROLLYARD_`` plus its name in capitals.

    Raises:
        pydantic.ValidationError: a value is out of range, or the gateway would listen on an
            address that others can reach without an API key.
    """

    model_config = SettingsConfigDict(
        env_prefix="ROLLYARD_", frozen=True, extra="ignore", env_ignore_empty=True
    )

    redis_url: str = "redis://127.0.0.1:6379/0"
    """Valkey or Redis ≥7: ``redis://host:port/db``, ``rediss://…`` or ``unix:///path/to.sock``;
    several separated by commas, ``redis+cluster://host:port,host:port`` or
    ``redis+sentinel://host:port,host:port/name``."""
    queue: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "rollyard"
    """Name of the queue (its Redis Cluster hash tag); gateways and workers of one pool share it."""
    shards: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts of the queue, spread over the servers; bounds are divided among them. The same for
    gateways and workers, and changed only while the queue is empty."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs an API key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port; 0 takes a free one, which the event ``gateway.listening`` names."""
    uds: Path | None = None
    """Unix socket to listen on instead of TCP; only this user may connect to it."""

    api_keys: SecretStr = SecretStr("")
    """Accepted bearer keys, separated by commas; a key may be given as ``sha256:<hex digest>``."""
    api_keys_file: Path | None = None
    """The same, one key a line; empty lines and lines that start with ``#`` are skipped."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 31)] = 32 * MIB
    """Largest request body; a larger one is answered 413 without being read to its end."""
    max_queued: Annotated[int, Field(ge=1)] = 100_000
    """Runs that may wait in the queue; beyond it requests are answered 503."""
    max_queued_bytes: Annotated[int, Field(ge=1024)] = 1 * GIB
    """Bytes that waiting runs may occupy in the queue; beyond it requests are answered 503."""
    max_queued_per_job: Annotated[int, Field(ge=0)] = 0
    """Runs of one job that may wait; beyond it that job's requests are answered 429. 0: no bound
    of its own."""
    max_queued_bytes_per_job: Annotated[int, Field(ge=0)] = 0
    """The same for the bytes of one job's waiting runs."""
    max_queued_wait_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Refuse (503) while runs would wait longer than this many seconds, at the rate at which the
    queue drains: for callers who prefer to go elsewhere. None: only the bounds above hold."""
    max_held_bytes: Annotated[int, Field(ge=1 * MIB)] = 512 * MIB
    """Bytes of request bodies that this process holds at once, from arrival to answer; beyond it
    requests are answered 503. Its memory is about twice that."""

    max_in_flight_per_key: Annotated[int, Field(ge=0)] = 0
    """Runs that callers with one API key may have in flight at this process; beyond it they are
    answered 429, and others are served. 0: no bound."""

    max_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 600.0
    """Largest ``limits.timeout_s`` that a caller may ask for, in seconds."""
    max_cpu_s: Annotated[float, Field(gt=0, le=3600)] = 3600.0
    """Largest ``limits.cpu_s``, in CPU seconds; a run that names none gets at most this."""
    max_memory_bytes: Annotated[int, Field(ge=16 * MIB)] = 16 * GIB
    """Largest ``limits.memory_bytes``."""
    max_disk_bytes: Annotated[int, Field(ge=1 * MIB)] = 8 * GIB
    """Largest ``limits.disk_bytes``."""
    max_pids: Annotated[int, Field(ge=1)] = 1024
    """Largest ``limits.pids``."""
    max_output_bytes: Annotated[int, Field(ge=0)] = 4 * MIB
    """Largest ``limits.output_bytes``: results travel through Valkey's memory."""

    max_wait_s: Annotated[float, Field(gt=0, le=86400)] = 900.0
    """Seconds a run may spend waiting for a worker (redelivery included) before the gateway
    answers ``infra_error``; a run's own ``timeout_s`` comes on top."""
    slack_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Seconds on top of ``max_wait_s`` and ``timeout_s``, for start-up, kill and the way back."""
    shutdown_grace_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """Seconds that SIGTERM leaves to requests in flight; what is unanswered then gets 503, or its
    stream is cut. No run is lost: sent again under its id, it is joined."""

    log_format: LogFormat = "json"
    """``json`` lines, or ``console`` for people; on standard error."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe log records that are written."""

    @property
    def ceilings(self) -> Ceilings:
        """The server's maximum for each limit."""
        return Ceilings(
            timeout_s=self.max_timeout_s,
            cpu_s=self.max_cpu_s,
            memory_bytes=self.max_memory_bytes,
            disk_bytes=self.max_disk_bytes,
            pids=self.max_pids,
            output_bytes=self.max_output_bytes,
        )

    @property
    def has_keys(self) -> bool:
        """True when callers must present a key."""
        return bool(self.api_keys.get_secret_value().strip(" ,")) or self.api_keys_file is not None

    @model_validator(mode="after")
    def _public_needs_key(self) -> Self:
        if self.uds is None and not is_loopback(self.host) and not self.has_keys:
            raise ValueError(
                f"refusing to listen on {self.host!r} without an API key: whoever reaches it could"
                " run programs. Set ROLLYARD_API_KEYS (comma separated) or ROLLYARD_API_KEYS_FILE"
                " (one key a line), or listen on 127.0.0.1 (ROLLYARD_HOST)."
            )
        return self
