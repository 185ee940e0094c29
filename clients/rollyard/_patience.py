"""How long a run is tried for, when the service does not take it.

    the caller set                  it is tried until
    ----------------------------    ---------------------------------------------------------
    timeout_s (call or client)      it has passed: DeadlineExceeded
    max_retries                     so many tries after the first have failed
    neither                         the service has given nobody an answer for PATIENCE_S,
                                    or for the run's deadline_s where that is longer, and
                                    FIRST_CONTACT_S where it never answered at all; or the
                                    run itself has failed for that long while others got on

A gateway that drains may refuse connections for half a minute, and one that starts again takes a
while: so the count of tries decides only where a caller asks for that. Waiting for a full queue is
no failure of a run, as long as the queue takes others.
"""

from rollyard._call import Call
from rollyard._retry import TransportFault
from rollyard.errors import RollyardError

PATIENCE_S = 120.0
FIRST_CONTACT_S = 20.0  # more likely a wrong address than an outage


class Patience:
    """Counts tries and decides when it is enough. Times are the loop's, in seconds."""

    def __init__(self, max_retries: int | None) -> None:
        self._max_retries = max_retries
        self._got_through_at: float | None = None
        self.trouble = ""

    def got_through(self, now: float) -> None:
        """Note that the service took runs."""
        self._got_through_at = now
        self.trouble = ""

    def troubled(self, error: RollyardError | TransportFault) -> None:
        """Note why a try failed."""
        self.trouble = str(error)

    def count(self, call: Call, *, got_on: bool, busy: bool, now: float) -> None:
        """Count a failed try of ``call``; its batch got some answers if it ``got_on``."""
        if got_on:  # a stream that gets on is no outage
            call.tries, call.failed_at = 0, None
        call.tries += 1
        if call.failed_at is None and not busy:
            call.failed_at = now

    def is_over(self, call: Call, now: float) -> bool:
        """True when a call that just failed is not tried again."""
        if self._max_retries is not None and call.tries > self._max_retries:
            return True
        if call.bounded or self._max_retries is not None:
            return False
        patience_s = FIRST_CONTACT_S if self._got_through_at is None else PATIENCE_S
        patience_s = max(patience_s, call.deadline_s or 0.0)
        waits_since = max(call.started, self._got_through_at or 0.0)
        failing_since = call.failed_at if call.failed_at is not None else now
        return now - min(waits_since, failing_since) > patience_s
