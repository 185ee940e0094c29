"""Asks gateways that failed whether they work again.

Where another gateway works, no run is risked to find out; one that says it is ready gets one small
batch, and works once it took that. Where none works, the runs that wait find out by themselves.
"""

import asyncio
from collections.abc import Callable

from rollyard._gateway import Gateway
from rollyard._retry import TransportFault
from rollyard._short import ask_one


class Watch:
    """One task for each gateway that failed. Belongs to one event loop."""

    def __init__(self, on_return: Callable[[], None]) -> None:
        self._on_return = on_return
        self._tasks: dict[Gateway, asyncio.Task[None]] = {}

    def look_after(self, gateway: Gateway) -> None:
        """Ask it whether it is ready until it is; never more often than it may be tried."""
        if gateway not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._ask(gateway))
            self._tasks[gateway] = task
            task.add_done_callback(lambda _: self._tasks.pop(gateway, None))

    def stop(self) -> None:
        """Ask no more."""
        for task in self._tasks.values():
            task.cancel()

    async def _ask(self, gateway: Gateway) -> None:
        loop = asyncio.get_running_loop()
        while gateway.failures:
            await asyncio.sleep(max(0.0, gateway.opens_at - loop.time()))
            asked_at = loop.time()
            outcome = await ask_one(gateway, "GET", "/readyz")
            if isinstance(outcome, bytes):
                gateway.ready = True
                self._on_return()
                return
            if isinstance(outcome, TransportFault) and not outcome.retry:
                return
            gateway.suspect(outcome, sent_at=asked_at, now=loop.time())
