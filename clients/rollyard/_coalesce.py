"""Many concurrent calls, few requests.

The first call opens a window; it closes after ``batch_max_delay_s`` or as soon as FILL_RUNS wait,
and what waits then travels in one request. Where many more wait, requests take more of them: up
to ``batch_max_runs``. While all connections are taken, or the gateways take no more runs, windows
stay open: the batches grow instead of the number of requests.

What got no answer goes back to the head of the line, and travels with the next request to any
gateway that works.
"""

import asyncio
from collections.abc import Sequence

from rollyard._call import Call
from rollyard._config import ClientConfig
from rollyard._exchange import Exchange, fail
from rollyard._gateway import Gateway
from rollyard._line import Line
from rollyard._pacer import STRIDE, Pacer, Work
from rollyard._patience import Patience
from rollyard._refusal import Refusal
from rollyard._retry import TransportFault, final_error, is_retried
from rollyard._watch import Watch
from rollyard.errors import Overloaded, RollyardError, TransportError

FILL_RUNS = 64
# A backlog is cut into this many requests for each gateway: few enough to be cheap (an HTTP
# request costs as much as 50 runs), and enough to let several processes of it share the work.
SPREAD = 4
_BLAMES_MEMBERS = frozenset({400, 409, 413, 422})


class Coalescer:
    """Puts calls into exchanges, in order. Belongs to one event loop."""

    def __init__(self, config: ClientConfig, gateways: Sequence[Gateway], pacer: Pacer) -> None:
        self._config = config
        self._gateways = gateways
        self._pacer = pacer
        self._watch = Watch(self._wake)
        self._patience = Patience(config.max_retries)
        self._loop = asyncio.get_running_loop()
        self._fill = min(FILL_RUNS, config.batch_max_runs)
        self._line = Line()
        self._timer: asyncio.TimerHandle | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self._due = False  # the window of what waits has closed
        self._sending = False
        self.exchanges: set[Exchange] = set()

    # -- the line ---------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Calls that are not on their way."""
        return self._line.waiting

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
        self._line.add(call)
        if self._due or len(self._line) >= self._fill:
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

    def wanted(self) -> set[str]:
        """Ids that callers have chosen and wait for, whether sent or not."""
        sent = (call for exchange in self.exchanges for call in exchange.calls)
        chosen = {call.run_id for call in sent if not call.own_id and not call.future.done()}
        return chosen.union(self._line.wanted())

    # -- sending ----------------------------------------------------------------------------

    def _send(self) -> Work:
        try:
            while self._is_due() and len(self.exchanges) < self._config.max_connections:
                found = self._open_gateway()
                if found is None:
                    return
                yield from self._send_one(*found)
                yield
        finally:
            self._sending = False
        if not self._line:
            self._due = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif not self._due and self._timer is None:
            self._timer = self._loop.call_later(self._config.batch_max_delay_s, self._window_closed)

    def _is_due(self) -> bool:
        waiting = len(self._line)
        return bool(self._line.apart or waiting >= self._fill or (waiting and self._due))

    def _open_gateway(self) -> tuple[Gateway, int] | None:
        """The least busy gateway that takes runs, and how many; one that failed only for want."""
        now = self._loop.time()
        waiting = self._line.apart or self._batch_runs()
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
        waiting = len(self._line)
        share = waiting // (SPREAD * len(self._gateways))
        return min(max(self._fill, min(share, self._config.batch_max_runs)), waiting)

    def _send_one(self, gateway: Gateway, runs: int) -> Work:
        batch = yield from self._line.take(runs)
        if batch:
            now = self._loop.time()
            gateway.sent(len(batch))
            exchange = Exchange(gateway, batch, host=self, pacer=self._pacer, now=now)
            self.exchanges.add(exchange)

    # -- what exchanges tell ----------------------------------------------------------------

    def admitted(self, exchange: Exchange) -> None:
        """Hear that a batch was taken."""
        exchange.gateway.admitted(sent_at=exchange.sent_at)
        self._patience.got_through(self._loop.time())
        if self._line:
            self._wake()

    def answered(self, exchange: Exchange, runs: int) -> None:
        """Hear that results came."""
        exchange.outstanding -= runs
        exchange.gateway.answered(runs, self._loop.time())
        if self._line:
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
        if not self.in_flight and self._line:  # the try spoke for all who waited
            self._pacer.start(self._tell_waiting(self._line.all_waiting(), error, sent_at, now))
        self._line.put_back(again)
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
            self._line.set_apart([call for place, call in enumerate(calls) if place not in guilty])
        else:
            half = len(calls) // 2
            self._line.set_apart(calls[:half], calls[half:])

    async def aclose(self) -> None:
        """End everything under way; who still waits gets TransportError."""
        self._watch.stop()
        for timer in (self._timer, self._reopening):
            if timer is not None:
                timer.cancel()
        self._timer = self._reopening = None
        self._line.close(TransportError("the client was closed"))
        tasks = [exchange.task for exchange in self.exchanges]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
