"""Would chaos notice? Its callers against a real service whose answers are tampered with."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rollyard.local import LocalService, local
from rollyard_loadtest.chaos_load import Ledger, Load

Tamper = Callable[[dict[str, Any]], list[dict[str, Any]]]
CALLS = 100


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    started = local(slots=8, templates=("bare",))
    with started:
        yield started


@asynccontextmanager
async def between(address: str, socket: Path, tamper: Tamper) -> AsyncGenerator[str]:
    """A gateway's address whose batches' results pass through ``tamper``."""
    transport = httpx2.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://service", timeout=60
    ) as real:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            method, path, _ = head[0].split()
            fields = {n.lower(): v for n, _, v in (line.partition(": ") for line in head[1:-1])}
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            kept = {n: v for n, v in fields.items() if n in ("accept", "content-type")}
            answer = await real.request(method, path, content=body, headers=kept)
            text = answer.content
            if answer.status_code == 200 and path == "/v1/batches":
                told = [one for line in text.splitlines() for one in tamper(json.loads(line))]
                text = b"".join(json.dumps(one).encode() + b"\n" for one in told)
            kind = answer.headers["content-type"]
            writer.write(
                f"HTTP/1.1 {answer.status_code} OK\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode()
                + text
            )
            await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(serve, socket)
        async with server:
            yield f"unix://{socket}"


def load_through(service: LocalService, socket: Path, tamper: Tamper, *, seed: int) -> Ledger:
    """Call at the real gateway and at the one in between; what the callers noted."""

    async def play() -> Ledger:
        async with between(service.address, socket, tamper) as other:
            load = Load(
                [service.address, other], callers=8, seed=seed, lease_s=0.3, science=False,
                now_s=asyncio.get_running_loop().time, forgotten=lambda since_s: False,
            )  # fmt: skip
            await load.run(until=lambda: len(load.ledger.entries) >= CALLS)
            return load.ledger

    return asyncio.run(play())


def as_it_is(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result]


def twice(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result, result]


def of_another_execution(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result | {"wall_ms": result["wall_ms"] + 1}]


def never_right(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result | {"outcome": "signal", "signal": 9}]


def test_nothing_is_noted_where_nothing_is_wrong(service: LocalService, tmp_path: Path) -> None:
    ledger = load_through(service, tmp_path / "s", as_it_is, seed=1)
    assert len(ledger.entries) >= CALLS
    assert ledger.open() == []
    assert [entry.problem for entry in ledger.entries if entry.problem] == []
    assert ledger.duplicated == []


def test_a_second_line_for_a_run_is_noted(service: LocalService, tmp_path: Path) -> None:
    ledger = load_through(service, tmp_path / "s", twice, seed=2)
    assert any(text.startswith("a second line for") for text in ledger.duplicated)


def test_two_results_of_one_id_are_noted(service: LocalService, tmp_path: Path) -> None:
    ledger = load_through(service, tmp_path / "s", of_another_execution, seed=3)
    assert any("has two results" in text for text in ledger.duplicated)
    assert not [entry for entry in ledger.entries if entry.problem]


def test_a_wrong_outcome_is_noted(service: LocalService, tmp_path: Path) -> None:
    ledger = load_through(service, tmp_path / "s", never_right, seed=4)
    wrong = [entry for entry in ledger.entries if entry.problem]
    small = [entry.problem for entry in wrong if entry.kind == "small"]
    assert small and all(problem.startswith("signal instead of ok") for problem in small)
