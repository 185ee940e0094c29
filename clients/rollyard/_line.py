"""The line in which calls wait until they are sent, and the batches that are taken from it."""

from collections import deque
from collections.abc import Generator, Iterable

from rollyard._call import Call
from rollyard._encode import Encoder
from rollyard._exchange import fail
from rollyard._pacer import STRIDE
from rollyard.errors import RollyardError

# A request is closed at this size even if it holds few runs: gateways bound their bodies.
BATCH_MAX_BYTES = 4 * 1024 * 1024
PURGE_CALLS = 16_384


class Line:
    """First come, first sent; who is sent back comes first."""

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._calls: deque[Call] = deque()
        self._taken: dict[str, Call] = {}  # for the next batch
        self._apart: deque[list[Call]] = deque()
        self._purge_at = PURGE_CALLS

    def __len__(self) -> int:
        """Calls that wait for a batch."""
        return len(self._calls)

    @property
    def apart(self) -> int:
        """Calls in the first batch that must travel as it is; 0: there is none."""
        return len(self._apart[0]) if self._apart else 0

    @property
    def waiting(self) -> int:
        """All calls that are not sent."""
        return len(self._calls) + len(self._taken) + sum(len(batch) for batch in self._apart)

    def add(self, call: Call) -> None:
        """Put a call at the end."""
        self._calls.append(call)
        if len(self._calls) >= self._purge_at:
            # Callers that leave while nothing can be sent: their calls must not pile up.
            self._calls = deque(call for call in self._calls if not call.future.done())
            self._purge_at = max(PURGE_CALLS, 2 * len(self._calls))

    def put_back(self, calls: list[Call]) -> None:
        """Put calls at the head, in order."""
        self._calls.extendleft(reversed(calls))

    def set_apart(self, *batches: list[Call]) -> None:
        """Have encoded calls travel in just these batches."""
        self._apart += batches

    def all_waiting(self) -> list[Call]:
        """All that wait for a batch at the moment."""
        return list(self._calls)

    def wanted(self) -> Iterable[str]:
        """Ids that callers have chosen, and wait for."""
        return (call.run_id for call in self._calls if not call.own_id and not call.future.done())

    def take(self, runs: int) -> Generator[None, None, list[Call]]:
        """Take the next batch: bounded in runs and bytes, every id once. May come out empty."""
        if self._apart:
            batch = self._apart.popleft()
        else:
            yield from self._take(runs)
            batch, self._taken = list(self._taken.values()), {}
        return [call for call in batch if not call.future.done()]

    def _take(self, runs: int) -> Generator[None, None, None]:
        batch = self._taken
        size = looked_at = 0
        while self._calls and len(batch) < runs:
            looked_at += 1
            if not looked_at % STRIDE:
                yield  # between two calls: none is out of sight when this is closed
                continue
            call = self._calls.popleft()
            if call.future.done() or not self._encoded(call):  # its caller left, or erred
                continue
            size += len(call.payload)
            if batch and (size > BATCH_MAX_BYTES or call.run_id in batch):
                self._calls.appendleft(call)
                return
            batch[call.run_id] = call

    def _encoded(self, call: Call) -> bool:
        if not call.payload:
            try:
                self._encoder.encode(call)
            except Exception as error:  # the caller's fault, which the caller shall see
                call.future.set_exception(error)
                return False
        return True

    def close(self, error: RollyardError) -> None:
        """Give an error to all who wait."""
        for calls in (self._taken.values(), self._calls, *self._apart):
            fail(calls, error)
        self._taken = {}
        self._calls.clear()
        self._apart.clear()
