"""What a load goes to: Rollyard by its SDK or by bare HTTP, or a server of another dialect.

A target sends works that arrive together and hands each answer over as soon as it is there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollyard_loadtest.tally import Answer
from rollyard_loadtest.workload import Work

TargetKind = Literal["sdk", "http", "sandboxfusion", "codejudge"]
"""``sdk``: rollyard.AsyncClient; ``http``: /v1/batches with as little Python as possible."""

SERVERS: dict[str, str] = {
    "sdk": "Rollyard", "http": "Rollyard (bare HTTP)", "sandboxfusion": "SandboxFusion",
    "codejudge": "code-judge",
}  # fmt: skip
"""What people call the server behind each kind."""

type Take = Callable[[int, Answer], None]
"""Takes a place in the request and its answer; each place at most once."""


class Refused(Exception):
    """The service was busy; ``places`` are the runs concerned."""

    def __init__(self, places: Sequence[int], retry_after_s: float | None = None) -> None:
        super().__init__(f"{len(places)} runs refused")
        self.places = places
        self.retry_after_s = retry_after_s


class Lost(Exception):
    """Some runs got no answer; the message says why. Those that were taken have theirs."""


@dataclass(frozen=True)
class Address:
    """Where a target is; travels to client processes as JSON."""

    kind: TargetKind
    url: str
    """``http://host:port`` or ``unix:///path``."""
    null: bool = False
    """Its workers run nothing: answers are not held against the programs' outputs."""


class Target(ABC):
    """One connection pool to one server, inside one event loop."""

    @abstractmethod
    async def open(self) -> None:
        """Connect, or get ready to."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    @abstractmethod
    async def send(self, works: Sequence[Work], prefix: str, take: Take) -> None:
        """Have all works run; call ``take`` for each answer.

        Args:
            works: What arrives together.
            prefix: Begins the ids of these runs; sent again with the same, they are joined.
            take: Called with the place in ``works``.

        Raises:
            Refused: the service was busy.
            Lost: runs are left without an answer.
        """
