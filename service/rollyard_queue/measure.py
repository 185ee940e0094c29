"""``python -m rollyard_queue.measure``: what one run costs the server, step by step.

Layer: a benchmark on the public contract. It starts an embedded server, passes runs through it in
batches, and reports the server's own CPU time, so that a busy machine or a slow client changes
the figures little: 1e6 divided by the sum is what one server does in isolation.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rollyard_queue.embedded import EmbeddedServer
from rollyard_queue.records import Delivery, FinishedRun, QueuedRun
from rollyard_queue.redis import RedisQueue

PAYLOAD_BYTES = 420  # a small run's JSON
RESULT_BYTES = 420  # a small result's JSON
STEPS = ("submit", "claim", "finish", "replies")
GATEWAY = "gw-" + "0" * 32
WORKER = "worker-" + "0" * 16


class Cost(NamedTuple):
    """What one run costs in one step, in µs."""

    step: str
    server_us: float
    wall_us: float


def cpu_s(pid: int) -> float:
    """Time that all threads of a process had a core, in seconds (schedstat: in ns)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


class Measurement:
    """Passes runs through one server, all of them in flight at once."""

    def __init__(self, server: EmbeddedServer, *, runs: int, batch: int, deadline: bool) -> None:
        self._server = server
        self._queue = RedisQueue.from_url(server.url)
        self._runs = runs
        self._batch = batch
        self._expires_in_ms = 600_000 if deadline else None
        self._claimed: list[list[Delivery]] = []
        self._round = 0
        self.server_us = dict.fromkeys(STEPS, 0.0)
        self.wall_us = dict.fromkeys(STEPS, 0.0)

    async def round(self) -> None:
        """Each step for all runs, before the next step begins."""
        self._round += 1
        for name, step in zip(
            STEPS, (self._submit, self._claim, self._finish, self._read), strict=True
        ):
            cpu, wall = cpu_s(self._server.pid), time.perf_counter()
            await step()
            self.server_us[name] += (cpu_s(self._server.pid) - cpu) / self._runs * 1e6
            self.wall_us[name] += (time.perf_counter() - wall) / self._runs * 1e6

    async def close(self) -> None:
        await self._queue.close()

    async def _submit(self) -> None:
        payload = b"x" * PAYLOAD_BYTES
        for start in range(0, self._runs, self._batch):
            runs = [
                QueuedRun(
                    f"{self._round:08x}{number:024x}",
                    payload,
                    expires_in_ms=self._expires_in_ms,
                    digest=b"digested",
                )
                for number in range(start, start + self._batch)
            ]
            await self._queue.submit(runs, reply_to=GATEWAY)

    async def _claim(self) -> None:
        self._claimed.clear()
        while got := await self._queue.claim(WORKER, max_runs=self._batch, lease_s=60):
            self._claimed.append(got)

    async def _finish(self) -> None:
        result = b"x" * RESULT_BYTES
        for got in self._claimed:
            finished = [FinishedRun(one.run_id, one.attempt, result) for one in got]
            await self._queue.finish(WORKER, finished)

    async def _read(self) -> None:
        while await self._queue.replies(GATEWAY, max_replies=512, wait_s=0):
            pass


async def measure(*, runs: int, batch: int, rounds: int, deadline: bool) -> list[Cost]:
    """µs of each step for one run: the server's CPU time, and what its only client waits."""
    async with EmbeddedServer() as server:
        measurement = Measurement(server, runs=runs, batch=batch, deadline=deadline)
        for _ in range(rounds):
            await measurement.round()
        await measurement.close()
    return [
        Cost(step, measurement.server_us[step] / rounds, measurement.wall_us[step] / rounds)
        for step in STEPS
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m rollyard_queue.measure",
        description="Measure what one run costs the queue's server, step by step.",
    )
    parser.add_argument("--runs", type=int, default=40_960, help="in flight (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="runs in one call (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (%(default)s)")
    parser.add_argument("--deadline", action="store_true", help="each run has a deadline")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.runs % options.batch:
        parser.error("--runs must be a multiple of --batch")
    costs = asyncio.run(
        measure(
            runs=options.runs,
            batch=options.batch,
            rounds=options.rounds,
            deadline=options.deadline,
        )
    )
    costs.append(
        Cost("sum", sum(cost.server_us for cost in costs), sum(cost.wall_us for cost in costs))
    )
    if options.json:
        text = json.dumps([cost._asdict() for cost in costs], indent=2)
    else:
        rows = [f"{'':10}{'server µs':>10}{'wall µs':>10}   for one run"]
        rows += [f"{cost.step:10}{cost.server_us:10.2f}{cost.wall_us:10.2f}" for cost in costs]
        rows.append(f"one server does {1e6 / costs[-1].server_us:,.0f} runs/s of CPU time")
        text = "\n".join(rows)
    print(text)  # noqa: T201 - a command's answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
