"""How many runs may start at once, so that short ones do not slow each other down.

A program that computes needs a core at once; one that sleeps needs none for long. At its start
nobody knows which it is, so each run holds a place until it ends, or is seen to sleep, or has had
half a second. Short programs then run nearly one after another, at their own speed, and sleepers
still fill all slots. Without it, 32 slots on two cores ran `print(1+1)` at a wall time of 270 ms
instead of 5.
"""

import asyncio
from collections import deque
from collections.abc import Callable

PLACES_FOR_EACH_CORE = 2
FIRST_LOOK_S = 0.005
"""After the program was ordered. What sleeps, sleeps soon; a look costs some 60 microseconds."""
HOLD_S = 0.025
MAX_HOLDS = 20


class StartGate:
    """First come, first served; ``places`` holders at once."""

    def __init__(self, places: int, hold_s: float = HOLD_S) -> None:
        self._free = places
        self._hold_s = hold_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> "Place":
        """Wait for a place; it must be left, and leaves by itself (see Place.watch)."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.pass_on()
                else:
                    self._waiting.remove(turn)
                raise
        return Place(self, self._hold_s)

    def pass_on(self) -> None:
        """Give a place that was left to the next in line."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Place:
    """One place, held."""

    def __init__(self, gate: StartGate, hold_s: float) -> None:
        self._gate = gate
        self._held = True
        self._hold_s = hold_s
        self._holds = 1
        self._computes: Callable[[], bool] = lambda: True
        self._timer = asyncio.get_running_loop().call_later(hold_s, self._look)

    def watch(self, computes: Callable[[], bool]) -> None:
        """Ask this soon, then from time to time, whether the run computes or wants to."""
        self._computes = computes
        if self._held:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(
                min(FIRST_LOOK_S, self._hold_s), self._look
            )

    def _look(self) -> None:
        if self._holds >= MAX_HOLDS or not self._computes():
            self.leave()
            return
        self._holds += 1
        self._timer = asyncio.get_running_loop().call_later(self._hold_s, self._look)

    def leave(self) -> None:
        """Let the next one in; a second call does nothing."""
        if self._held:
            self._held = False
            self._timer.cancel()
            self._gate.pass_on()
