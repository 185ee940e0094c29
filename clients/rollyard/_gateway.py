"""One gateway as the client sees it: where it is, whether it takes runs, and how many."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rollyard._config import Address
from rollyard._retry import RetryPolicy, TransportFault, retry_after_s
from rollyard._transport import Transport
from rollyard._window import Window
from rollyard.errors import Overloaded, RollyardError, StatusError

PROBE_RUNS = 64  # what is risked at a gateway that just failed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """What a client has at one gateway."""

    address: str
    in_flight: int
    """Runs sent and not answered."""
    window: int
    """Runs that may be in flight; refusals halve it, answers open it again."""
    refused: int
    """Runs that it refused since the client was made: its queue was full."""
    failures: int
    """Failed tries in a row; 0 while it works."""

    @staticmethod
    def sum(parts: "Sequence[GatewayLoad]") -> "GatewayLoad":
        """The load that several loops of one client put on the same gateway."""
        return GatewayLoad(
            address=parts[0].address,
            in_flight=sum(part.in_flight for part in parts),
            window=sum(part.window for part in parts),
            refused=sum(part.refused for part in parts),
            failures=max(part.failures for part in parts),
        )


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """What a client has under way."""

    waiting: int
    """Calls that are not sent yet: they gather, or the gateways take no more at the moment."""
    in_flight: int
    """Runs sent and not answered."""
    gateways: tuple[GatewayLoad, ...]


class Gateway:
    """Its state, kept by the coalescer. Times are the loop's, in seconds."""

    def __init__(self, address: Address, transport: Transport, policy: RetryPolicy) -> None:
        self.address = address
        self.transport = transport
        self.window = Window()
        self.failures = 0
        self.opens_at = 0.0
        """Nothing is sent before: it asked for that, or it failed."""
        self.ready = True
        """It has not failed, or it said since that it is ready."""
        self.refused = 0
        self._policy = policy
        self._turned_away = 0  # refusals in a row
        self._refused_at = float("-inf")
        self._may_be_early = False
        self._freed = 0  # answers since then
        self._failed_at = float("-inf")
        self._probing = False

    @property
    def load(self) -> GatewayLoad:
        return GatewayLoad(
            address=str(self.address),
            in_flight=self.window.in_flight,
            window=int(self.window.limit),
            refused=self.refused,
            failures=self.failures,
        )

    def takes(self, now: float, waiting: int) -> int:
        """How many of the waiting runs may be sent now; 0: none."""
        if now < self.opens_at or self._probing:
            return 0
        room = min(self.window.room, PROBE_RUNS if self.failures else waiting)
        return room if room >= min(self.window.worth_sending, waiting) else 0

    def sent(self, runs: int) -> None:
        """Note runs that leave for it. After a failure the next waits until these are admitted."""
        self.window.sent(runs)
        self._probing = self.failures > 0

    def admitted(self, *, sent_at: float) -> None:
        """Note that it took a batch: it works, unless it failed after that was sent."""
        if sent_at < self._failed_at:
            return
        if self.failures > 1:
            logger.warning("the gateway at %s works again", self.address)
        self.window.admitted()
        self.failures = self._turned_away = 0
        self.ready = True
        self._probing = False

    def answered(self, runs: int, now: float) -> None:
        """Note results. They make room, which may be used before the time that a refusal named.

        That time is an estimate, and what has been answered since is a fact: once it is half of
        what the gateway had of ours, we ask again; refused then, we wait as long as we are told.
        """
        self.window.answered(runs, now)
        self._freed += runs
        if self._may_be_early and now < self.opens_at and self._freed >= self.window.in_flight:
            self._may_be_early = False
            self.opens_at = now

    def ended(self) -> None:
        """Note that a batch it had not admitted is over, for whatever reason."""
        self._probing = False

    def failed(
        self, error: RollyardError | TransportFault, runs: int, *, sent_at: float, now: float
    ) -> None:
        """Note a try of ``runs`` runs that brought no answer but may be repeated."""
        if isinstance(error, StatusError) and error.status in (429, 503):
            self.window.refused(runs, sent_at=sent_at, now=now)
        else:
            self.window.gone(runs)
        if isinstance(error, Overloaded):  # it is busy, and that is all
            self.refused += runs
            if sent_at >= self._refused_at:
                delay_s = self._policy.delay_s(self._turned_away, retry_after_s(error))
                self.opens_at = max(self.opens_at, now + delay_s)
                self._may_be_early = not self._turned_away
                self._refused_at, self._freed = now, 0
                self._turned_away += 1
        else:
            self.suspect(error, sent_at=sent_at, now=now)

    def suspect(self, error: RollyardError | TransportFault, *, sent_at: float, now: float) -> None:
        """Note that it does not work; what was sent before that was known says nothing new."""
        if sent_at < self._failed_at:
            return
        self._failed_at = now
        self.opens_at = now + self._policy.delay_s(self.failures, retry_after_s(error))
        self.failures += 1
        self.ready = False
        if self.failures == 2:  # a single fault is everyday life
            logger.warning("the gateway at %s does not work: %s; trying on", self.address, error)
