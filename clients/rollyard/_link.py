"""What a client owns inside one event loop: connections, the line of calls, and clean-up."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from rollyard._abandon import Abandonment
from rollyard._call import Call, Options
from rollyard._coalesce import Coalescer
from rollyard._config import ClientConfig
from rollyard._deadlines import Deadlines
from rollyard._gateway import Gateway
from rollyard._pacer import Pacer
from rollyard._retry import RetryPolicy
from rollyard._short import ShortRequests
from rollyard._transport import transport_class
from rollyard.types import RunRequest


class Link:
    """The parts of one loop. Open it before use."""

    def __init__(self, config: ClientConfig) -> None:
        self._loop = asyncio.get_running_loop()
        connect, policy, pacer = transport_class(config.transport), RetryPolicy(), Pacer()
        self.gateways = [
            Gateway(address, connect(config, address), policy) for address in config.gateways
        ]
        self.coalescer = Coalescer(config, self.gateways, pacer)
        self.short = ShortRequests(self.gateways, config.max_retries)
        self.abandonment = Abandonment(self.coalescer, pacer, self.short)
        self._deadlines = Deadlines(pacer, self.abandonment.late)
        # None of the parts knows the link: it, and with it the guard, must not be in a cycle.
        self._guard = _close_with_loop(
            self.gateways, self.coalescer, self.abandonment, self._deadlines, pacer
        )

    async def open(self) -> None:
        """Tie the connections to the loop; does not suspend."""
        await anext(self._guard)

    async def aclose(self) -> None:
        """Close everything; runs under way end with TransportError."""
        await self.abandonment.flush()
        await self._guard.aclose()

    def start(
        self,
        asked: str | RunRequest,
        job: str,
        run_id: str | None,
        options: Options,
        timeout_s: float | None,
    ) -> Call:
        """Send a run; the call's future always ends, with DeadlineExceeded after ``timeout_s``."""
        call = Call(asked, self._loop, job, run_id, options, timeout_s is not None)
        self.coalescer.submit(call)
        if timeout_s is not None:
            self._deadlines.add(call, timeout_s)
        return call

    def left(self, call: Call) -> None:
        """Note that the one who waited for ``call`` was cancelled."""
        if not call.future.cancelled() and call.future.done():
            call.future.exception()  # it ended in the same turn: nobody else will look
        self.abandonment.add([call])


async def _close_with_loop(
    gateways: list[Gateway],
    coalescer: Coalescer,
    abandonment: Abandonment,
    deadlines: Deadlines,
    pacer: Pacer,
) -> AsyncGenerator[None, None]:
    """Close the connections when the loop ends, even if nobody closed the client.

    An event loop closes the async generators that were started in it (asyncio.run does, at its
    end), and finishes one that is garbage: so neither a trainer that calls asyncio.run once per
    step nor one that drops a client leaves sockets behind.
    """
    try:
        yield
    finally:
        abandonment.stop()
        deadlines.stop()
        pacer.stop()
        await _to_the_end(coalescer.aclose, *(gateway.transport.aclose for gateway in gateways))


async def _to_the_end(*closing: Callable[[], Awaitable[None]]) -> None:
    """Close all, even if cancelled: a loop that ends cancels this too, and never comes back."""
    cancelled: asyncio.CancelledError | None = None
    for close in closing:
        try:
            await close()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
