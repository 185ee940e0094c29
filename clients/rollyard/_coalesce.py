"""Many concurrent calls, few requests.

The first call opens a window; it closes after ``batch_max_delay_s`` or as soon as
``batch_max_runs`` wait, and what waits then travels in one request. While all connections are
taken, windows stay open: the batches grow instead of the number of requests.
"""

import asyncio
from collections import deque

from rollyard._call import Call
from rollyard._config import ClientConfig
from rollyard._exchange import Exchange
from rollyard._retry import RetryPolicy
from rollyard._transport import Transport
from rollyard.errors import TransportError

# A request is closed at this size even if it holds few runs: gateways bound their bodies.
BATCH_MAX_BYTES = 4 * 1024 * 1024


class Coalescer:
    """Puts calls into exchanges, in order. Belongs to one event loop."""

    def __init__(self, config: ClientConfig, transport: Transport) -> None:
        self._config = config
        self._transport = transport
        self._policy = RetryPolicy(config.max_retries)
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._due = False  # the window of what is pending has closed
        self.exchanges: set[Exchange] = set()

    def submit(self, call: Call) -> None:
        """Send ``call`` with the current window."""
        self._pending.append(call)
        if self._timer is None or len(self._pending) >= self._config.batch_max_runs:
            self._pump()

    def _window_closed(self) -> None:
        self._timer = None
        self._due = True
        self._pump()

    def _pump(self) -> None:
        config = self._config
        while (
            self._pending
            and (self._due or len(self._pending) >= config.batch_max_runs)
            and len(self.exchanges) < config.max_connections
        ):
            self._start(self._take())
        if not self._pending:
            self._due = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None and not self._due:
            self._timer = self._loop.call_later(config.batch_max_delay_s, self._window_closed)

    def _take(self) -> list[Call]:
        """The next batch: bounded in runs and bytes, every id once."""
        batch: dict[str, Call] = {}
        size = 0
        while self._pending and len(batch) < self._config.batch_max_runs:
            call = self._pending[0]
            if not call.future.done():  # else its caller left before it was sent
                size += len(call.payload)
                if batch and (size > BATCH_MAX_BYTES or call.run_id in batch):
                    break
                batch[call.run_id] = call
            self._pending.popleft()
        return list(batch.values())

    def _start(self, batch: list[Call]) -> None:
        if not batch:
            return
        exchange = Exchange(self._transport, self._policy, batch)
        self.exchanges.add(exchange)

        def ended(task: asyncio.Task[None]) -> None:
            self.exchanges.discard(exchange)
            if not task.cancelled():
                task.exception()
            self._pump()

        exchange.task.add_done_callback(ended)

    async def aclose(self) -> None:
        """End everything under way; who still waits gets TransportError."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for call in self._pending:
            if not call.future.done():
                error = TransportError("the client was closed", run_id=call.run_id)
                call.future.set_exception(error)
        self._pending.clear()
        tasks = [exchange.task for exchange in self.exchanges]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
