"""What a client owns inside one event loop: connections, windows, and clean-up."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable

from rollyard._call import Call
from rollyard._coalesce import Coalescer
from rollyard._config import ClientConfig
from rollyard._refusal import Refusal, read_refusal
from rollyard._retry import RetryPolicy, TransportFault, final_error, is_retried, retry_after_s
from rollyard._transport import Transport, transport_class
from rollyard.errors import RollyardError

SHORT_REQUEST_S = 15.0  # cancel, stats, health: answered from memory or one queue round trip
# Callers that leave together (a cancelled task group) are looked at together: a batch that
# nobody waits for any more needs no cancel per run, only its connection closed.
ABANDON_DELAY_S = 0.01
CANCELS_AT_ONCE = 8

logger = logging.getLogger(__name__)


class Link:
    """Connections and coalescer of one loop. Open it before use."""

    def __init__(self, config: ClientConfig) -> None:
        self._policy = RetryPolicy(config.max_retries)
        self._transport = transport_class(config.transport)(config)
        self.coalescer = Coalescer(config, self._transport)
        self._cancels: set[asyncio.Task[None]] = set()
        self._cancel_slots = asyncio.Semaphore(CANCELS_AT_ONCE)
        self._abandoned: list[Call] = []
        self._guard = _close_with_loop(self.coalescer, self._transport, self._cancels)

    async def open(self) -> None:
        """Tie the connections to the loop; does not suspend."""
        await anext(self._guard)

    async def aclose(self) -> None:
        """Close everything; runs under way end with TransportError."""
        if self._abandoned:
            self._sweep()
        if self._cancels:  # give what was just given up a moment to be said
            await asyncio.wait(set(self._cancels), timeout=1.0)
        await self._guard.aclose()

    # -- runs -------------------------------------------------------------------------------

    def abandon(self, calls: Iterable[Call]) -> None:
        """Nobody waits for these any more: stop them where they are, in the background."""
        sent = [call for call in calls if call.exchange is not None and not call.answered]
        if sent and not self._abandoned:
            asyncio.get_running_loop().call_later(ABANDON_DELAY_S, self._sweep)
        self._abandoned += sent

    def _sweep(self) -> None:
        calls, self._abandoned = self._abandoned, []
        for call in calls:
            exchange = call.exchange
            assert exchange is not None
            if not exchange.live:
                # The gateway drops the runs of a caller that hangs up. A single run with an id
                # of our own is also cancelled by name: a proxy may keep the connection open.
                exchange.task.cancel()
                if exchange.size > 1 or not call.own_id:
                    continue
            if any(other.waits_for(call.run_id) for other in self.coalescer.exchanges):
                continue
            task = asyncio.get_running_loop().create_task(self._cancel_quietly(call.run_id))
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def _cancel_quietly(self, run_id: str) -> None:
        async with self._cancel_slots:
            try:
                await self.request("DELETE", f"/v1/runs/{run_id}", retry=False)
            except RollyardError as error:
                logger.debug("could not cancel run %s: %s", run_id, error)

    # -- short requests ---------------------------------------------------------------------

    async def request(self, method: str, path: str, *, retry: bool = True) -> bytes:
        """Send an idempotent request without a body; return the body of its 2xx answer.

        Raises:
            RollyardError: as the table in ``_retry`` says.
        """
        tries = 0
        while True:
            outcome = await self._try_once(method, path)
            if isinstance(outcome, bytes):
                return outcome
            tries += 1
            if not retry or tries > self._policy.max_retries or not is_retried(outcome):
                raise final_error(outcome, tries=tries)
            await asyncio.sleep(self._policy.delay_s(tries - 1, retry_after_s(outcome)))

    async def _try_once(self, method: str, path: str) -> bytes | RollyardError | TransportFault:
        refusal: Refusal
        try:
            async with self._transport.request(
                method, path, None, accept="application/json", read_timeout_s=SHORT_REQUEST_S
            ) as answer:
                if 200 <= answer.status < 300:
                    return b"".join([chunk async for chunk in answer.chunks()])
                refusal = await read_refusal(answer)
        except TransportFault as fault:
            return fault
        return refusal.error()


async def _close_with_loop(
    coalescer: Coalescer, transport: Transport, cancels: set[asyncio.Task[None]]
) -> AsyncGenerator[None, None]:
    """Close the connections when the loop ends, even if nobody closed the client.

    An event loop closes the async generators that were started in it (asyncio.run does, at its
    end), and finishes one that is garbage: so neither a trainer that calls asyncio.run once per
    step nor one that drops a client leaves sockets behind.
    """
    try:
        yield
    finally:
        for task in cancels:
            task.cancel()
        await coalescer.aclose()
        await transport.aclose()
