"""A client as rStar2's rollout has it: many calls gathered into batches, short-lived connections.

Written from its behaviour: at most 32 submissions a batch, a new connection for each request,
60 s in all, four attempts, of which each sends only what ended as queue_timeout, and half a
second, then one, two, four of pause after each.
"""

import asyncio
from typing import Any

import aiohttp

BATCH = 32
ATTEMPTS = 4
FIRST_PAUSE_S = 0.5

Json = dict[str, Any]


class RolloutClient:
    def __init__(self, endpoint: str, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._url = f"{endpoint}/run/long-batch"
        self._pause_s = first_pause_s
        self.requests: list[int] = []
        """Number of submissions in each request."""

    async def run(self, submissions: list[Json]) -> list[Json | None]:
        """Results in order; None for what no attempt brought."""
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            starts = range(0, len(submissions), BATCH)
            batches = [self._batch(session, submissions[start : start + BATCH]) for start in starts]
            return [result for results in await asyncio.gather(*batches) for result in results]

    async def _batch(
        self, session: aiohttp.ClientSession, submissions: list[Json]
    ) -> list[Json | None]:
        results: dict[int, Json] = {}
        for attempt in range(ATTEMPTS):
            missing = [i for i in range(len(submissions)) if i not in results]
            if not missing:
                break
            self.requests.append(len(missing))
            body = {"type": "batch", "submissions": [submissions[i] for i in missing]}
            try:
                async with session.post(self._url, json=body) as answer:
                    answer.raise_for_status()
                    judged = (await answer.json())["results"]
                pairs = zip(missing, judged, strict=True)
                results |= {i: one for i, one in pairs if one["reason"] != "queue_timeout"}
            finally:
                await asyncio.sleep(self._pause_s * 2**attempt)
        return [results.get(i) for i in range(len(submissions))]
