"""Requests without a body: cancel, stats, health."""

import asyncio
from collections.abc import Sequence

from rollyard._gateway import Gateway
from rollyard._refusal import read_refusal
from rollyard._retry import RetryPolicy, TransportFault, final_error, is_retried, retry_after_s
from rollyard.errors import RollyardError

ANSWER_S = 15.0  # answered from memory or with one round trip to the queue
RETRIES = 8  # where the client counts none: 10 to 20 s


class ShortRequests:
    """Asks whichever gateway works."""

    def __init__(self, gateways: Sequence[Gateway], max_retries: int | None) -> None:
        self._gateways = gateways
        self._retries = RETRIES if max_retries is None else max_retries
        self._policy = RetryPolicy()

    async def ask(self, method: str, path: str, *, retry: bool = True) -> bytes:
        """Send an idempotent request; return the body of its 2xx answer.

        Raises:
            RollyardError: as the table in ``_retry`` says.
        """
        tries = 0
        while True:
            # A second try goes to another gateway.
            ranked = sorted(self._gateways, key=lambda gateway: gateway.failures)
            outcome = await ask_one(ranked[tries % len(ranked)], method, path)
            if isinstance(outcome, bytes):
                return outcome
            tries += 1
            if not retry or tries > self._retries or not is_retried(outcome):
                raise final_error(outcome, tries=tries)
            await asyncio.sleep(self._policy.delay_s(tries - 1, retry_after_s(outcome)))

    async def any_answers(self, path: str) -> bool:
        """True when some gateway answers ``GET path`` with 2xx. Each is asked once."""
        asked = [ask_one(gateway, "GET", path) for gateway in self._gateways]
        return any(isinstance(outcome, bytes) for outcome in await asyncio.gather(*asked))


async def ask_one(
    gateway: Gateway, method: str, path: str
) -> bytes | RollyardError | TransportFault:
    """Send one request to one gateway; return the body of its 2xx answer, or what went wrong."""
    try:
        async with gateway.transport.request(
            method, path, None, accept="application/json", read_timeout_s=ANSWER_S
        ) as answer:
            if 200 <= answer.status < 300:
                return b"".join([chunk async for chunk in answer.chunks()])
            refusal = await read_refusal(answer)
    except TransportFault as fault:
        return fault
    return refusal.error()
