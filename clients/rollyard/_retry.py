"""What is tried again, when, and what is raised once it is not.

How often, or for how long, is in ``_patience``. Every retry carries the same run ids, which are the
idempotency keys: a run that the service has already taken is joined, never run twice.

    what happened                                       tried again
    ------------------------------------------------    ------------------------------------
    no connection (refused, reset, name, time-out)      yes
    answer broken off, garbled or silent too long       yes, only runs without an answer
    408, 429, 502, 503, 504                             yes, not before Retry-After; where it says
                                                        429 or 503, less is in flight (_window)
    any other status                                    no
    a result, whatever its outcome                      no: a time-out of the code is data
"""

import random
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from rollyard.errors import (
    BadRequest,
    Conflict,
    Overloaded,
    PayloadTooLarge,
    RollyardError,
    StatusError,
    TransportError,
    Unauthorized,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504})

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 8.0
MAX_RETRY_AFTER_S = 60.0  # a longer Retry-After is a mistake or an outage: look again by then
RETRY_AFTER_SPREAD = 0.25  # so that refused clients do not all come back in the same instant

_ERRORS: dict[int, type[StatusError]] = {
    401: Unauthorized,
    403: Unauthorized,
    408: Unavailable,
    409: Conflict,
    413: PayloadTooLarge,
    429: Overloaded,
}


class TransportFault(Exception):
    """One request brought no complete answer. Internal: callers see TransportError."""

    def __init__(self, message: str, *, retry: bool = True) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait before the next try; ``_patience`` says whether there is one."""

    uniform: "Callable[[float, float], float]" = random.uniform

    def delay_s(self, retry: int, retry_after_s: float | None = None) -> float:
        """Seconds to wait before retry number ``retry``, counted from 0.

        Exponential from 0.1 s to 8 s, of which the upper half is random; never less than the
        Retry-After that the service named, up to 60 s.
        """
        backoff = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(retry, 30))
        delay = backoff * self.uniform(0.5, 1.0)
        if retry_after_s is None:
            return delay
        asked = min(max(retry_after_s, 0.0), MAX_RETRY_AFTER_S)
        return max(delay, asked * (1.0 + self.uniform(0.0, RETRY_AFTER_SPREAD)))


def is_retried(error: RollyardError | TransportFault) -> bool:
    """True when the table above says to try again."""
    if isinstance(error, TransportFault):
        return error.retry
    return isinstance(error, StatusError) and error.status in RETRIED_STATUSES


def retry_after_s(error: RollyardError | TransportFault) -> float | None:
    """What the service asked us to wait, in seconds."""
    return error.retry_after_s if isinstance(error, StatusError) else None


def parse_retry_after(headers: "Mapping[str, str]") -> float | None:
    """Seconds in a Retry-After header; a date counts from the answer's own Date, not our clock."""
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            until = parsedate_to_datetime(text)
            answered = parsedate_to_datetime(headers.get("date", ""))
            return max(0.0, (until - answered).total_seconds())
        except (ValueError, TypeError):
            return None
    return seconds if 0.0 <= seconds < float("inf") else None


def error_class(status: int) -> type[StatusError]:
    """The exception that stands for an error status."""
    if status in _ERRORS:
        return _ERRORS[status]
    return Unavailable if status >= 500 else BadRequest


def final_error(error: RollyardError | TransportFault, *, tries: int) -> RollyardError:
    """What the caller sees when ``error`` was the last of ``tries`` tries."""
    after = f" (after {tries} tries)" if tries > 1 else ""
    if isinstance(error, TransportFault):
        return TransportError(f"{error}{after}")
    if isinstance(error, StatusError) and after:
        return type(error)(
            f"{error.message}{after}",
            status=error.status,
            request_id=error.request_id,
            retry_after_s=error.retry_after_s,
        )
    return error
