"""What one would write in an afternoon, to be measured beside ours: FastAPI, redis-py, two lists.

    python -m rollyard_loadtest.plain gateway --redis unix:///… --uds /…/gateway.sock
    python -m rollyard_loadtest.plain worker --redis unix:///…

A request is validated by pydantic, pushed to a list, and answered by what a blocking pop of its own
list returns. There is no lease, no bound, no cancellation and no fairness. The worker answers at
once. uvloop, httptools and hiredis are used, and nothing is made slow on purpose.
"""

import argparse
import sys
from typing import Any, cast
from uuid import uuid4

import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import BaseModel, Field
from redis.asyncio import Redis

ANSWER_S = 60


class PlainRequest(BaseModel):
    """The fields of a run that most callers set."""

    code: str
    stdin: str | None = None
    timeout_s: float = Field(default=10.0, gt=0, le=600)
    memory_bytes: int = Field(default=512 << 20, ge=16 << 20)


class PlainJob(PlainRequest):
    """What travels to the worker."""

    run_id: str


class PlainResult(BaseModel):
    """What comes back."""

    run_id: str
    outcome: str
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    wall_ms: float = 0.0


def make_app(redis_url: str) -> FastAPI:
    """The service."""
    app = FastAPI()
    redis: Any = cast("Any", Redis).from_url(redis_url, socket_timeout=None)

    @app.post("/run")
    async def run(request: PlainRequest) -> PlainResult:
        run_id = uuid4().hex
        job = PlainJob(run_id=run_id, **request.model_dump())
        await redis.lpush("jobs", job.model_dump_json())
        _, answer = await redis.blpop([f"answer:{run_id}"], timeout=ANSWER_S)
        return PlainResult.model_validate_json(answer)

    return app


async def work(redis_url: str) -> None:
    """Answer every job at once, for ever."""
    redis: Any = cast("Any", Redis).from_url(redis_url, socket_timeout=None)
    while True:
        _, text = await redis.brpop(["jobs"])
        job = PlainJob.model_validate_json(text)
        result = PlainResult(run_id=job.run_id, outcome="ok", exit_code=0, stdout="2\n")
        await redis.lpush(f"answer:{job.run_id}", result.model_dump_json())


def main() -> int:
    """One process of the plain service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("gateway", "worker"))
    parser.add_argument("--redis", required=True)
    parser.add_argument("--uds")
    options = parser.parse_args()
    if options.part == "worker":
        uvloop.run(work(options.redis))
    else:
        uvicorn.run(
            make_app(options.redis), uds=options.uds, loop="uvloop", http="httptools",
            access_log=False, log_level="warning", backlog=4096,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
