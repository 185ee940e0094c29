"""Calls that nobody waits for any more: their runs are stopped where they are."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

from rollyard._call import Call
from rollyard._coalesce import Coalescer
from rollyard._exchange import Exchange
from rollyard._pacer import STRIDE, Pacer, Work
from rollyard._short import ShortRequests
from rollyard.errors import DeadlineExceeded, RollyardError

# Callers that leave together (a cancelled task group) are looked at together: a batch that
# nobody waits for any more needs no cancel per run, only its connection closed.
DELAY_S = 0.01
CANCELS_AT_ONCE = 8

logger = logging.getLogger(__name__)


class Abandonment:
    """Hangs up and cancels, in the background. Belongs to one event loop."""

    def __init__(self, coalescer: Coalescer, pacer: Pacer, requests: ShortRequests) -> None:
        self._coalescer = coalescer
        self._pacer = pacer
        self._requests = requests
        self._abandoned: list[Call] = []
        self._to_cancel: deque[str] = deque()
        self._cancels: set[asyncio.Task[None]] = set()

    def add(self, calls: Iterable[Call]) -> None:
        """Stop what was sent of ``calls``; the rest just is not."""
        sent = [call for call in calls if call.sent and not call.answered]
        if sent and not self._abandoned:
            asyncio.get_running_loop().call_later(DELAY_S, self._sweep)
        self._abandoned += sent

    def late(self, call: Call, timeout_s: float) -> None:
        """End a call whose own time-out passed."""
        trouble = self._coalescer.trouble
        message = f"no result within {timeout_s:g} s{f' ({trouble})' if trouble else ''}"
        call.future.set_exception(DeadlineExceeded(message, run_id=call.run_id))
        if call.own_id:  # with an id of the caller's, the next call may ask for the result
            self.add([call])

    async def flush(self) -> None:
        """Give what was just given up a moment to be said."""
        if self._abandoned:
            deque(self._sweeping(), maxlen=0)
        if self._cancels:
            await asyncio.wait(set(self._cancels), timeout=1.0)

    def stop(self) -> None:
        """Drop what is not yet said."""
        for task in self._cancels:
            task.cancel()

    def _sweep(self) -> None:
        if self._abandoned:
            self._pacer.start(self._sweeping())

    def _sweeping(self) -> Work:
        calls, self._abandoned = self._abandoned, []
        live: dict[Exchange, bool] = {}
        chosen = any(not call.own_id for call in calls)
        wanted = self._coalescer.wanted() if chosen else set[str]()
        for place, call in enumerate(calls):
            if place % STRIDE == STRIDE - 1:
                yield
            exchange = call.exchange
            if exchange is not None:
                if exchange not in live:
                    live[exchange] = exchange.live
                if not live[exchange]:
                    # The gateway drops the runs of a caller that hangs up. A single run with an id
                    # of our own is also cancelled by name: a proxy may keep the connection open.
                    exchange.task.cancel()
                    if len(exchange.calls) > 1 or not call.own_id:
                        continue
            if not call.own_id and call.run_id in wanted:
                continue
            self._cancel(call.run_id)

    def _cancel(self, run_id: str) -> None:
        self._to_cancel.append(run_id)
        if len(self._cancels) < CANCELS_AT_ONCE:
            task = asyncio.get_running_loop().create_task(self._cancel_quietly())
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def _cancel_quietly(self) -> None:
        while self._to_cancel:
            run_id = self._to_cancel.popleft()
            try:
                await self._requests.ask("DELETE", f"/v1/runs/{run_id}", retry=False)
            except RollyardError as error:
                logger.debug("could not cancel run %s: %s", run_id, error)
