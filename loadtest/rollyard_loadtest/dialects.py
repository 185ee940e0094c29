"""The same programs through each dialect and through the native API: verdicts and runs/s.

    python -m rollyard_loadtest.dialects URL [--runs N] [--at-once N]

Each way is driven as its clients do it: ``/run_code`` with one program a request, code-judge's
``/run/long-batch`` with 32 a request and a connection for each, the native API by the SDK.
Fails when a verdict differs.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp

from rollyard import AsyncClient

SEED = 20260101
BATCH = 32
AT_ONCE = 64
TIMEOUT_S = 5


class Verdict(NamedTuple):
    """What all dialects can say of a run."""

    good: bool
    stdout: str


Way = Callable[[list[str]], Awaitable[list[Verdict]]]


def programs(count: int) -> list[str]:
    """A rollout's mix: loops, numpy, exceptions and exit codes; the same each time."""
    draw = random.Random(SEED)  # noqa: S311 - a reproducible mix
    made: list[str] = []
    for number in range(count):
        kind = draw.random()
        if kind < 0.6:
            made.append(f"print(sum(i * i for i in range({draw.randrange(100, 20_000)})))")
        elif kind < 0.8:
            made.append(f"import numpy as np\nprint(int(np.arange({number}).sum()))")
        elif kind < 0.9:
            made.append(f"print({number})\nraise ValueError({number})")
        else:
            made.append(f"print({number})\nraise SystemExit({draw.randrange(3)})")
    return made


def _native(url: str, _at_once: int) -> Way:
    async def run(codes: list[str]) -> list[Verdict]:
        async with AsyncClient(url) as client:
            runs = [{"code": code, "limits": {"timeout_s": TIMEOUT_S}} for code in codes]
            return [Verdict(one.ok, one.stdout) for one in await client.run_all(runs)]

    return run


def _run_code(url: str, at_once: int) -> Way:
    async def run(codes: list[str]) -> list[Verdict]:
        room = asyncio.Semaphore(at_once)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as session:

            async def one(code: str) -> Verdict:
                body = {"code": code, "language": "python", "run_timeout": TIMEOUT_S}
                async with room:
                    answer = await _post(session, f"{url}/run_code", body)
                return Verdict(answer["status"] == "Success", answer["run_result"]["stdout"])

            return list(await asyncio.gather(*(one(code) for code in codes)))

    return run


def _long_batch(url: str, _at_once: int) -> Way:
    async def run(codes: list[str]) -> list[Verdict]:
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one(batch: list[str]) -> list[Verdict]:
                submissions = [{"type": "python", "solution": code} for code in batch]
                body = {"type": "batch", "submissions": submissions}
                answer = await _post(session, f"{url}/run/long-batch", body)
                return [Verdict(r["success"], r["stdout"]) for r in answer["results"]]

            starts = range(0, len(codes), BATCH)
            batches = await asyncio.gather(*(one(codes[i : i + BATCH]) for i in starts))
            return [verdict for batch in batches for verdict in batch]

    return run


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as answer:
        answer.raise_for_status()
        return await answer.json()


async def measure(url: str, *, runs: int, at_once: int) -> int:
    """Print a line for each way; return the number of verdicts that differ from the native."""
    codes = programs(runs)
    expected: list[Verdict] = []
    differing = 0
    for name, make in (("native", _native), ("/run_code", _run_code), ("long-batch", _long_batch)):
        way = make(url, at_once)
        await way(codes[:64])  # connections and slots
        began = time.monotonic()
        verdicts = await way(codes)
        took_s = time.monotonic() - began
        expected = expected or verdicts
        wrong = sum(got != want for got, want in zip(verdicts, expected, strict=True))
        differing += wrong
        print(f"{name:12} {runs / took_s:8.0f} runs/s  {wrong} verdicts differ")  # noqa: T201
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("url", help="http://host:port of a gateway without keys")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    given = parser.parse_args()
    return min(1, asyncio.run(measure(given.url, runs=given.runs, at_once=given.at_once)))


if __name__ == "__main__":
    sys.exit(main())
