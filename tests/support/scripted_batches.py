"""A server of /v1/batches that does as a test says: a real one cannot be made to lie."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Runs = list[dict[str, Any]]
Script = Callable[["Scripted", Runs, web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Scripted:
    """What the server saw."""

    url: str
    script: Script
    requests: list[Runs] = field(default_factory=list[Runs])
    now: int = 0
    most: int = 0
    """Runs in requests under way: now, and at most."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        runs: Runs = (await request.json())["runs"]
        self.requests.append(runs)
        self.now += len(runs)
        self.most = max(self.most, self.now)
        try:
            return await self.script(self, runs, request)
        finally:
            self.now -= len(runs)


def result(run: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The right answer to a program of the kind ``print``, but for ``fields``."""
    number = int(run["code"].removeprefix("print(").removesuffix(" + 1)"))
    return {"run_id": run["run_id"], "outcome": "ok", "stdout": f"{number + 1}\n", **fields}


def lines(results: list[dict[str, Any]]) -> web.Response:
    """An answer of NDJSON."""
    text = "".join(json.dumps(one) + "\n" for one in results)
    return web.Response(text=text, content_type="application/x-ndjson")


async def honest(server: Scripted, runs: Runs, request: web.Request) -> web.StreamResponse:
    """Answers all at once, rightly."""
    await asyncio.sleep(0)
    return lines([result(run) for run in runs])


@asynccontextmanager
async def serving(directory: Path, script: Script = honest) -> AsyncGenerator[Scripted]:
    """Serve a script on a Unix socket."""
    socket = directory / "scripted.sock"
    scripted = Scripted(f"unix://{socket}", script)
    app = web.Application()
    app.router.add_post("/v1/batches", scripted.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield scripted
    finally:
        await runner.cleanup()
