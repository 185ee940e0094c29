"""One run on its way: what the caller asked for, as it is sent, and where the answer goes."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from rollyard.types import Language, Limits, RunRequest, RunResult, Template

if TYPE_CHECKING:
    from rollyard._exchange import Exchange

# Seconds a run without deadline_s may wait in the queue before its silence is taken for a fault.
# Only a fault nobody noticed is found this way (TCP keepalive finds dead peers), so it is long.
QUEUE_ALLOWANCE_S = 600.0
# Start-up, delivery to another worker after a loss, and the way back.
MARGIN_S = 60.0
MIN_DEADLINE_S = 0.001  # the service takes no 0


class LimitsDict(TypedDict, total=False):
    """:class:`rollyard.Limits` as a dict; what is absent is at the service's default."""

    timeout_s: float
    compile_timeout_s: float
    cpu_s: float | None
    memory_bytes: int
    disk_bytes: int
    pids: int
    output_bytes: int


RunLike = str | RunRequest | Mapping[str, object]
"""A program, a request, or a dict with the fields of a request (files may be bytes)."""


class Options(NamedTuple):
    """The arguments of ``run`` beside the code, as they were given: not yet validated."""

    stdin: str | None = None
    limits: Limits | LimitsDict | None = None
    files: Mapping[str, str | bytes] | None = None
    fetch_files: Iterable[str] = ()
    template: Template = "auto"
    on_output_limit: Literal["truncate", "stop"] = "truncate"
    language: Language = "python"
    isolation: Literal["warm", "fresh"] = "warm"
    echo_last: bool = False
    priority: int = 0
    deadline_s: float | None = None


PLAIN = Options()


class Call:
    """One run that somebody waits for.

    Making one does as little as possible: ten thousand callers that start in one turn of their
    loop all make theirs within that turn. What is asked is looked at later, by ``Encoder``.
    """

    __slots__ = (
        "asked",
        "bounded",
        "deadline_s",
        "exchange",
        "failed_at",
        "future",
        "job",
        "options",
        "own_id",
        "payload",
        "queued_at",
        "run_id",
        "sent",
        "started",
        "timeout_s",
        "tries",
    )

    def __init__(
        self,
        asked: str | RunRequest,
        loop: asyncio.AbstractEventLoop,
        job: str = "default",
        run_id: str | None = None,
        options: Options = PLAIN,
        bounded: bool = False,
    ) -> None:
        self.asked = asked
        """The code, to which ``job`` and ``options`` belong, or a valid request."""
        self.job = job
        self.options = options
        self.own_id = run_id is None
        """The id was made here, so nobody else can wait for this run."""
        self.run_id = os.urandom(16).hex() if run_id is None else run_id
        self.bounded = bounded
        """The caller's own time-out ends it, so that the count of tries need not."""
        self.future: asyncio.Future[RunResult] = loop.create_future()
        self.started = self.queued_at = loop.time()
        """When it was asked for, and when it was last put in line; loop time."""
        self.payload = b""
        """The run as it travels, without its deadline; empty until it is encoded."""
        self.deadline_s: float | None = None
        self.timeout_s = 0.0
        """Of the program: its limit."""
        self.exchange: Exchange | None = None
        """The HTTP exchange that carries it, while one does."""
        self.sent = False
        """The service may know of it."""
        self.tries = 0
        """Tries that failed since it, or a neighbour in its batch, got on."""
        self.failed_at: float | None = None
        """When the first of them failed."""

    @property
    def silence_s(self) -> float:
        """Silence in seconds that this run explains: it may be queued, then running."""
        queue_s = self.deadline_s if self.deadline_s is not None else QUEUE_ALLOWANCE_S
        return queue_s + self.timeout_s + MARGIN_S

    def payload_at(self, now: float) -> bytes:
        """The payload, with what is left of its deadline: a retry must not prolong it.

        Past it the service still decides: the run may have started in time.
        """
        if self.deadline_s is None:
            return self.payload
        left_s = max(MIN_DEADLINE_S, self.deadline_s - (now - self.started))
        return b'%b,"deadline_s":%r}' % (self.payload[:-1], left_s)

    @property
    def answered(self) -> bool:
        """True when a result came; False while it waits, when it failed, or was given up."""
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None
