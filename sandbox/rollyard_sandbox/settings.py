"""Settings of a worker: flags over environment over defaults."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from rollyard_sandbox import image


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class WorkerSettings(BaseSettings):
    """One worker process. Each field is also ``ROLLYARD_<NAME>`` in the environment."""

    model_config = SettingsConfigDict(env_prefix="ROLLYARD_", frozen=True, extra="ignore")

    redis_url: str = "redis://127.0.0.1:6379/0"
    """Valkey or Redis ≥7: redis://, rediss:// or unix://; several separated by commas,
    redis+cluster://host:port,… or redis+sentinel://host:port,…/name."""
    queue: str = "rollyard"
    """Name of the queue; gateways and workers of one service share it."""
    shards: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts of the queue, spread over the servers; the same for gateways and workers."""
    max_running_per_job: Annotated[int, Field(ge=0)] = 0
    """Runs of one job at once, on all workers together; 0: no bound. The same for all workers."""
    slots: Annotated[int, Field(ge=1, le=4096)] = Field(default_factory=lambda: 16 * _cores())
    """Runs at once. More than cores: most runs of a rollout wait or are short."""
    templates: str = "bare,science,plot"
    """Warm interpreters, comma separated; ``plot`` starts when the first run wants it."""
    state_dir: Path = Field(default_factory=image.default_state_dir)
    """Where guest images live; must be searchable for all users when the worker is root."""
    allow_degraded: bool = False
    """Start although a sandbox layer is missing; each result then names it."""
    lease_s: Annotated[float, Field(gt=0.5, le=600)] = 15.0
    """A worker that does not renew for this long has lost its runs to others."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """On SIGTERM: how long running runs may finish before they are handed back to the queue."""

    log_format: Literal["json", "console"] | None = None
    """``json`` lines, or ``console`` for people; none: by whether standard error is a terminal."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """TCP port of Prometheus metrics (docs/metrics.md); 0 takes a free one, none: no endpoint."""
    metrics_host: str = "127.0.0.1"
    """Address of the same. It needs no key, so beyond loopback let only Prometheus reach it."""

    def template_names(self) -> tuple[str, ...]:
        """The templates, checked.

        Raises:
            ValueError: a name is unknown.
        """
        return image.template_names(self.templates)


def explained(error: ValueError) -> str:
    """What is wrong with the settings, on one line, by their names in the environment."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        "".join(f"ROLLYARD_{name}: ".upper() for name in problem["loc"][:1])
        + problem["msg"].removeprefix("Value error, ")
        for problem in error.errors()
    )
