"""Rollyard's own API as a target: through the SDK, and by HTTP alone."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from rollyard import AsyncClient, Overloaded, RollyardError, RunRequest, RunResult, Unavailable
from rollyard_loadtest.load import Load
from rollyard_loadtest.tally import Answer
from rollyard_loadtest.target import Lost, Refused, Take, Target
from rollyard_loadtest.workload import Work

_NDJSON = "application/x-ndjson"
BUSY = frozenset({429, 503})


def _job(number: int) -> str:
    return f"bench-{number}"


class SdkTarget(Target):
    """As users call it: single runs with ``submit``, which coalesces, batches with ``run_batch``.

    What its retries cost is in the latency; how many there were the SDK does not say.
    """

    def __init__(self, url: str, load: Load, *, in_flight: int, client: AsyncClient | None = None):
        self._load = load
        self._client = client or AsyncClient(
            url,
            max_retries=load.retries,
            max_connections=max(256, in_flight // 32),
            transport="aiohttp",
        )
        self._number = 0

    async def open(self) -> None:
        await self._client.healthy()

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, works: Sequence[Work], prefix: str, take: Take) -> None:
        self._number += 1
        extra: dict[str, Any] = {"job": _job(self._number % self._load.jobs)}
        if self._load.deadline_s is not None:
            extra["deadline_s"] = self._load.deadline_s
        requests = [
            RunRequest.model_validate({**work.request(), **extra, "run_id": f"{prefix}-{place}"})
            for place, work in enumerate(works)
        ]
        try:
            if len(requests) == 1:
                take(0, _of_result(await self._client.submit(requests[0])))
            else:
                await self._batch(requests, prefix, take)
        except (Overloaded, Unavailable) as error:
            raise Refused(range(len(works)), error.retry_after_s) from None
        except RollyardError as error:
            raise Lost(f"{type(error).__name__}: {error}") from None

    async def _batch(self, requests: list[RunRequest], prefix: str, take: Take) -> None:
        start = len(prefix) + 1
        async for result in self._client.run_batch(requests):
            take(int(result.run_id[start:]), _of_result(result))


def _of_result(result: RunResult) -> Answer:
    return Answer(result.outcome, result.stdout, result.wall_ms, result.cpu_ms, result.queued_ms,
                  result.attempt, result.message)  # fmt: skip


class _Result(msgspec.Struct):
    """The members of a RunResult that a load test looks at."""

    run_id: str
    outcome: str
    stdout: str = ""
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    queued_ms: float = 0.0
    attempt: int = 1
    message: str = ""


class HttpTarget(Target):
    """``POST /v1/batches``, answers streamed as NDJSON; requests are put together from bytes."""

    def __init__(self, url: str, load: Load, *, api_key: str | None = None) -> None:
        self._load = load
        self._base, self._socket = split_url(url)
        self._headers = {"content-type": "application/json", "accept": _NDJSON}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._encoded: dict[int, tuple[Work, bytes]] = {}
        self._decoder = msgspec.json.Decoder(_Result)
        self._session: aiohttp.ClientSession | None = None
        self._number = 0

    async def open(self) -> None:
        self._session = session(self._socket, self._headers)

    async def close(self) -> None:
        assert self._session is not None
        await self._session.close()

    def _bytes(self, work: Work) -> bytes:
        # By identity: works come from a pool, and one is encoded once. The work is kept, so that
        # its identity is not given to another.
        found = self._encoded.get(id(work))
        if found is None:
            extra = {} if self._load.deadline_s is None else {"deadline_s": self._load.deadline_s}
            found = work, msgspec.json.encode({**work.request(), **extra})[1:]
            self._encoded[id(work)] = found
        return found[1]

    def _body(self, works: Sequence[Work], prefix: str) -> bytes:
        self._number += 1
        job = _job(self._number % self._load.jobs)
        runs = [
            b'{"run_id":"%b-%d","job":"%b",%b'
            % (prefix.encode(), place, job.encode(), self._bytes(work))
            for place, work in enumerate(works)
        ]
        return b'{"runs":[' + b",".join(runs) + b"]}"

    async def send(self, works: Sequence[Work], prefix: str, take: Take) -> None:
        assert self._session is not None
        body, start, left = self._body(works, prefix), len(prefix) + 1, len(works)
        try:
            async with self._session.post(f"{self._base}/v1/batches", data=body) as answer:
                if answer.status in BUSY:
                    raise Refused(range(len(works)), _retry_after_s(answer.headers))
                if answer.status != 200:
                    raise Lost(f"HTTP {answer.status}: {(await answer.text())[:200]}")
                rest = b""
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        result = self._decoder.decode(line)
                        left -= 1
                        take(int(result.run_id[start:]), _of_struct(result))
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise Lost(f"{type(error).__name__}: {error}") from None
        if left:
            raise Lost(f"{left} results are missing in a whole answer")


def _of_struct(result: _Result) -> Answer:
    return Answer(result.outcome, result.stdout, result.wall_ms, result.cpu_ms, result.queued_ms,
                  result.attempt, result.message)  # fmt: skip


def _retry_after_s(headers: Any) -> float | None:
    try:
        return float(headers["retry-after"])
    except (KeyError, ValueError):
        return None


def split_url(url: str) -> tuple[str, str | None]:
    """Base URL and Unix socket of an address."""
    path = url.removeprefix("unix://")
    return (url.rstrip("/"), None) if path == url else ("http://localhost", path)


def session(socket: str | None, headers: dict[str, str]) -> aiohttp.ClientSession:
    """A session without bounds of its own: how much is in flight is the load's business."""
    connector = aiohttp.UnixConnector(socket, limit=0) if socket else aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers,
                                 read_bufsize=1 << 18)  # fmt: skip


async def until_ready(url: str, timeout_s: float) -> bool:
    """Wait until a gateway says that it is ready; False when it did not in time."""
    deadline = time.monotonic() + timeout_s
    async with AsyncClient(url) as client:
        while not await client.ready():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
    return True
