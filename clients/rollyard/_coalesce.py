"""Many concurrent calls, few requests.

The first call opens a window; it closes after ``batch_max_delay_s`` or as soon as FILL_RUNS wait,
and what waits then travels in one request. Where many more wait, requests take more of them: up
to ``batch_max_runs``. While all connections are taken, or the gateways take no more runs, windows
stay open: the batches grow instead of the number of requests.

What got no answer goes back to the head of the line, and travels with the next request to any
gateway that works.
"""

import asyncio
from collections import deque
from collections.abc import Generator, Sequence

from rollyard._call import Call
from rollyard._config import ClientConfig
from rollyard._encode import Encoder
from rollyard._exchange import Exchange, fail
from rollyard._gateway import Gateway
from rollyard._pacer import STRIDE, Pacer, Work
from rollyard._patience import Patience
from rollyard._refusal import Refusal
from rollyard._retry import TransportFault, final_error, is_retried
from rollyard._watch import Watch
from rollyard.errors import Overloaded, RollyardError, TransportError

# A request is closed at this size even if it holds few runs: gateways bound their bodies.
BATCH_MAX_BYTES = 4 * 1024 * 1024
FILL_RUNS = 64
# A backlog is cut into this many requests for each gateway: few enough to be cheap (an HTTP
# request costs as much as 50 runs), and enough to let several processes of it share the work.
SPREAD = 4
PURGE_RUNS = 16_384
_BLAMES_MEMBERS = frozenset({400, 409, 413, 422})


class Coalescer:
    """Puts calls into exchanges, in order. Belongs to one event loop."""

    def __init__(self, config: ClientConfig, gateways: Sequence[Gateway], pacer: Pacer) -> None:
        self._config = config
        self._gateways = gateways
        self._pacer = pacer
        self._watch = Watch(self._wake)
        self._patience = Patience(config.max_retries)
        self._encoder = Encoder()
        self._loop = asyncio.get_running_loop()
        self._fill = min(FILL_RUNS, config.batch_max_runs)
        self._pending: deque[Call] = deque()
        self._gathering: dict[str, Call] = {}  # the next batch
        self._apart: deque[list[Call]] = deque()  # batches that must travel as they are
        self._purge_at = PURGE_RUNS
        self._timer: asyncio.TimerHandle | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self._due = False  # the window of what is pending has closed
        self._sending = False
        self.exchanges: set[Exchange] = set()

    # -- the line ---------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Calls that are not on their way."""
        apart = sum(len(batch) for batch in self._apart)
        return len(self._pending) + len(self._gathering) + apart

    @property
    def in_flight(self) -> int:
        """Runs that are on their way."""
        return sum(gateway.window.in_flight for gateway in self._gateways)

    @property
    def share(self) -> int:
        """Runs that one batch may have under way: half, so that other calls find room too."""
        return max(self._fill, sum(int(gateway.window.limit) for gateway in self._gateways) // 2)

    @property
    def trouble(self) -> str:
        """Why nothing gets through at the moment, for messages; else empty."""
        return self._patience.trouble

    def submit(self, call: Call) -> None:
        """Send ``call`` with the current window."""
        self._pending.append(call)
        if len(self._pending) >= self._purge_at:
            # Callers that leave while nothing can be sent: their calls must not pile up.
            self._pending = deque(call for call in self._pending if not call.future.done())
            self._purge_at = max(PURGE_RUNS, 2 * len(self._pending))
        if self._due or len(self._pending) >= self._fill:
            self._wake()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._config.batch_max_delay_s, self._window_closed)

    def _window_closed(self) -> None:
        self._timer = None
        self._due = True
        self._wake()

    def _wake(self) -> None:
        if not self._sending:
            self._sending = True
            self._pacer.start(self._send())

    def waits_for(self, run_id: str) -> bool:
        """True while somebody waits for that run, sent or not."""
        return any(one.waits_for(run_id) for one in self.exchanges) or any(
            call.run_id == run_id and not call.future.done() for call in self._pending
        )

    # -- sending ----------------------------------------------------------------------------

    def _send(self) -> Work:
        try:
            while self._is_due() and len(self.exchanges) < self._config.max_connections:
                found = self._open_gateway()
                if found is None:
                    return
                yield from self._fill_one(*found)
                yield
        finally:
            self._sending = False
        if not self._pending:
            self._due = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif not self._due and self._timer is None:
            self._timer = self._loop.call_later(self._config.batch_max_delay_s, self._window_closed)

    def _is_due(self) -> bool:
        return bool(self._apart) or (
            bool(self._pending) and (self._due or len(self._pending) >= self._fill)
        )

    def _open_gateway(self) -> tuple[Gateway, int] | None:
        """The least busy gateway that takes runs, and how many; one that failed only for want."""
        now = self._loop.time()
        waiting = len(self._apart[0]) if self._apart else self._batch_runs()
        working = [gateway for gateway in self._gateways if gateway.ready]
        candidates = [
            (gateway.window.in_flight, place, gateway, room)
            for place, gateway in enumerate(working or self._gateways)
            if (room := gateway.takes(now, waiting))
        ]
        if candidates:
            _, _, gateway, room = min(candidates)
            return gateway, min(room, waiting)
        closed = [g.opens_at for g in working or self._gateways if g.opens_at > now]
        if closed:
            self._wake_at(min(closed))
        return None

    def _wake_at(self, when: float) -> None:
        if self._reopening is not None:
            if self._reopening.when() <= when:
                return
            self._reopening.cancel()
        self._reopening = self._loop.call_at(when, self._reopened)

    def _reopened(self) -> None:
        self._reopening = None
        self._wake()

    def _batch_runs(self) -> int:
        backlog = len(self._pending) // (SPREAD * len(self._gateways))
        return min(max(self._fill, min(backlog, self._config.batch_max_runs)), len(self._pending))

    def _fill_one(self, gateway: Gateway, runs: int) -> Work:
        if self._apart:
            batch = [call for call in self._apart.popleft() if not call.future.done()]
        else:
            batch = yield from self._take(runs)
        if batch:
            now = self._loop.time()
            gateway.sent(len(batch))
            exchange = Exchange(gateway, batch, host=self, pacer=self._pacer, now=now)
            self.exchanges.add(exchange)

    def _take(self, runs: int) -> Generator[None, None, list[Call]]:
        """The next batch: bounded in runs and bytes, every id once."""
        batch = self._gathering
        size = looked_at = 0
        while self._pending and len(batch) < runs:
            call = self._pending.popleft()
            looked_at += 1
            if not looked_at % STRIDE:
                yield
            if call.future.done() or not self._encoded(call):  # its caller left, or erred
                continue
            size += len(call.payload)
            if batch and (size > BATCH_MAX_BYTES or call.run_id in batch):
                self._pending.appendleft(call)
                break
            batch[call.run_id] = call
        self._gathering = {}
        return list(batch.values())

    def _encoded(self, call: Call) -> bool:
        if not call.payload:
            try:
                self._encoder.encode(call)
            except Exception as error:  # the caller's fault, or a strange argument: it may see it
                call.future.set_exception(error)
                return False
        return True

    # -- what exchanges tell ----------------------------------------------------------------

    def admitted(self, exchange: Exchange) -> None:
        """Hear that a batch was taken."""
        exchange.gateway.admitted(sent_at=exchange.sent_at)
        self._patience.got_through(self._loop.time())
        if self._pending:
            self._wake()

    def answered(self, exchange: Exchange, runs: int) -> None:
        """Hear that results came."""
        exchange.outstanding -= runs
        exchange.gateway.window.answered(runs, self._loop.time())
        if self._pending:
            self._wake()

    def ended(self, exchange: Exchange, why: Refusal | TransportFault | None) -> None:
        """Hear that an exchange is over; what has no answer is asked for again, or fails."""
        self.exchanges.discard(exchange)
        exchange.gateway.ended()
        left = [call for call in exchange.calls if not call.future.done()]
        if left and isinstance(why, Refusal) and why.status in _BLAMES_MEMBERS:
            exchange.gateway.window.gone(exchange.outstanding)
            self._part(list(exchange.calls), why)
        elif left and why is not None:
            self._failed(exchange, left, why.error() if isinstance(why, Refusal) else why)
        else:
            exchange.gateway.window.gone(exchange.outstanding)
        self._wake()

    def _failed(
        self, exchange: Exchange, left: list[Call], error: RollyardError | TransportFault
    ) -> None:
        now, sent_at = self._loop.time(), exchange.sent_at
        if not is_retried(error):
            exchange.gateway.window.gone(exchange.outstanding)
            fail(left, final_error(error, tries=1 + max(call.tries for call in left)))
            return
        exchange.gateway.failed(error, exchange.outstanding, sent_at=sent_at, now=now)
        if exchange.gateway.failures and len(self._gateways) > 1:
            self._watch.look_after(exchange.gateway)
        self._patience.troubled(error)
        unknown = isinstance(error, Overloaded)  # it says so: nothing of the batch was queued
        again: list[Call] = []
        for call in left:
            call.sent = not unknown
            self._patience.count(call, got_on=exchange.got_on, busy=unknown, now=now)
            call.queued_at = now
            if self._patience.is_over(call, now):
                fail([call], final_error(error, tries=call.tries))
            else:
                again.append(call)
        if not self.in_flight and self._pending:  # the try spoke for all who waited
            self._pacer.start(self._tell_waiting(list(self._pending), error, sent_at, now))
        self._pending.extendleft(reversed(again))
        self._due = True

    def _tell_waiting(
        self, calls: list[Call], error: RollyardError | TransportFault, sent_at: float, now: float
    ) -> Work:
        for place, call in enumerate(calls):
            if place % STRIDE == STRIDE - 1:
                yield
            if call.future.done() or call.exchange is not None or call.queued_at > sent_at:
                continue
            call.tries += 1
            if self._patience.is_over(call, now):
                fail([call], final_error(error, tries=call.tries))

    def _part(self, calls: list[Call], refusal: Refusal) -> None:
        """Find the runs for which the batch was refused, so that no neighbour suffers."""
        for call in calls:
            call.sent = False
        if len(calls) == 1:
            fail(calls, refusal.error(0))
            return
        guilty = {place for place in refusal.problems if place < len(calls)}
        if guilty and len(guilty) == len(refusal.problems):
            for place in guilty:
                fail([calls[place]], refusal.error(place))
            self._apart.append([call for place, call in enumerate(calls) if place not in guilty])
        else:
            half = len(calls) // 2
            self._apart += [calls[:half], calls[half:]]

    async def aclose(self) -> None:
        """End everything under way; who still waits gets TransportError."""
        self._watch.stop()
        for timer in (self._timer, self._reopening):
            if timer is not None:
                timer.cancel()
        self._timer = self._reopening = None
        for batch in (self._gathering.values(), self._pending, *self._apart):
            fail(batch, TransportError("the client was closed"))
        self._gathering = {}
        self._pending.clear()
        self._apart.clear()
        tasks = [exchange.task for exchange in self.exchanges]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
