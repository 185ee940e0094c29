"""What is refused before its body is read: a queue that is full, or too many bytes held here.

Protects against: work on requests that cannot be admitted, bodies that together fill this process's
memory, and (where asked for) waits that nobody wants. The queue itself counts once more and exactly
when runs are submitted; here stands what is known without asking it.
"""

from rollyard_service.load import Load
from rollyard_service.refusal import Refusal, overloaded, too_large, unavailable

MEMORY_RETRY_S = 1.0


class Admission:
    """Decides by headers and by the load that this process knows."""

    def __init__(
        self, load: Load, *, max_queued: int, max_queued_bytes: int,
        max_queued_wait_s: float | None, max_held_bytes: int, max_body_bytes: int,
    ) -> None:  # fmt: skip
        self._load = load
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._max_queued_wait_s = max_queued_wait_s
        self._max_held_bytes = max_held_bytes
        self._max_body_bytes = max_body_bytes
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of all requests that are not answered yet."""
        return self._held_bytes

    def hold(self, size_bytes: int) -> None:
        """Count a body, or a part of one, that is about to arrive; release() it in the end.

        Raises:
            Refusal: 413, this one is too large; 503, all together would be.
        """
        if size_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        held = self._held_bytes + size_bytes
        if held > self._max_held_bytes and self._held_bytes:
            raise overloaded(
                f"requests in flight here hold {self._held_bytes} bytes of at most"
                f" {self._max_held_bytes} (ROLLYARD_MAX_HELD_BYTES); nothing was queued",
                MEMORY_RETRY_S,
            )
        self._held_bytes = held

    def release(self, size_bytes: int) -> None:
        """The opposite of hold()."""
        self._held_bytes -= size_bytes

    def check(self, size_bytes: int) -> None:
        """Raise where a request with a body of this size cannot be admitted now.

        Raises:
            Refusal: 503, with the seconds after which there should be room.
        """
        half = self._max_queued_bytes // 2
        if (
            self._max_queued_wait_s is None
            and size_bytes < half
            and self._load.is_light(self._max_queued // 2, half)
        ):
            return
        if refusal := self._refusal(size_bytes):
            raise refusal

    def _refusal(self, size_bytes: int) -> Refusal | None:
        load = self._load
        if load.silence:
            return unavailable(load.silence)
        runs, size = load.queued()
        if runs >= self._max_queued:
            return overloaded(
                f"the queue holds {runs:.0f} runs of at most {self._max_queued};"
                " nothing was queued",
                load.retry_after_s(runs - self._max_queued + 1),
            )
        if size + size_bytes > self._max_queued_bytes:
            share = (size + size_bytes - self._max_queued_bytes) / max(1.0, size)
            return overloaded(
                f"the queue holds {size:.0f} bytes of at most {self._max_queued_bytes};"
                " nothing was queued",
                load.retry_after_s(share * runs),
            )
        longest_s, rate = self._max_queued_wait_s, load.rate
        if longest_s is not None and rate and runs > rate * longest_s:
            return overloaded(
                f"{runs:.0f} runs wait, about {runs / rate:.1f} s at {rate:.0f} runs a second;"
                f" at most {longest_s:g} s are allowed (ROLLYARD_MAX_QUEUED_WAIT_S)",
                load.retry_after_s(runs - rate * longest_s),
            )
        return None
