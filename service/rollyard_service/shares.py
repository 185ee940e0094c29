"""How many runs each API key has in flight here, and who has its share already."""

from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rollyard_service.load import Load
from rollyard_service.refusal import overloaded

_UNCOUNTED = nullcontext()


class Shares:
    """Counts by key; without a bound, or for a gateway without keys, nothing is counted."""

    def __init__(self, load: Load, *, max_in_flight_per_key: int) -> None:
        """``max_in_flight_per_key`` 0: no bound."""
        self._load = load
        self._most = max_in_flight_per_key
        self._in_flight = Counter[bytes]()

    def check(self, key: bytes, runs: int = 1) -> None:
        """Raise where ``runs`` more would be more than this key's share.

        A batch that is larger than the share by itself is taken while the key has nothing else in
        flight: refused, it could never be run.

        Raises:
            Refusal: 429.
        """
        held = self._in_flight[key] if self._most and key else 0
        if held and held + runs > self._most:
            raise overloaded(
                f"this key has {held} runs in flight here, of at most {self._most}"
                " (ROLLYARD_MAX_IN_FLIGHT_PER_KEY); nothing was queued",
                self._load.retry_after_s(held + runs - self._most),
                status=429,
            )

    def taken(self, key: bytes, runs: int) -> AbstractContextManager[None]:
        """Count runs as in flight within the block.

        Raises:
            Refusal: (on entering) 429, see check().
        """
        return self._counted(key, runs) if self._most and key else _UNCOUNTED

    @contextmanager
    def _counted(self, key: bytes, runs: int) -> Generator[None]:
        self.check(key, runs)
        self._in_flight[key] += runs
        try:
            yield
        finally:
            self._in_flight[key] -= runs
            if not self._in_flight[key]:
                del self._in_flight[key]
