"""How long the SDK keeps its caller's event loop from everything else.

    python -m rollyard_loadtest.sdk_stall [--calls 1000,10000,45000] [--json]

Starts N concurrent ``await client.run()`` at once, in a fresh process each time, against a gateway
that runs nothing, while a heartbeat in the same loop measures the longest time between two beats.
``bare`` is the floor: N tasks that only await a future, without any SDK; what its row shows is the
price of starting and ending N tasks at once, whoever does it. ``run_all`` hands the same programs
to one ``await client.run_all()``, which needs no task for each (over httpx2).

Stalls are given by the wall clock, and by the thread's CPU clock, which on a shared machine leaves
out what other processes took. ``gc`` is the longest garbage collection within, by that clock: it
walks all objects of the process, the caller's too, and no library can divide it. Where it is most
of the stall, the caller can spare itself the walk over all that its imports made, by one
``gc.freeze()`` after them; ``--freeze`` shows the difference.
"""

import argparse
import asyncio
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

import rollyard

BEAT_S = 0.001
READY_S = 20.0
KINDS = ("bare", "httpx2", "aiohttp", "run_all")
BARE_SLICE = 500  # the floor's answers come as the SDK's do: so many in one turn of the loop


@dataclass
class Stalls:
    """One measurement; times in milliseconds."""

    kind: str
    calls: int
    stall_ms: float
    stall_cpu_ms: float
    gc_ms: float
    total_ms: float
    cpu_ms: float
    calls_per_s: float
    requests: int


class Heartbeat:
    """Beats within a loop; remembers the longest gaps."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            self.wall_s = max(self.wall_s, time.perf_counter() - wall - BEAT_S)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)

    def stop(self) -> None:
        self._task.cancel()


class Collections:
    """The longest pause for garbage collection."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.longest_s = max(self.longest_s, time.thread_time() - self._began)


async def _bare(futures: list[asyncio.Future[str]], _code: str) -> str:
    future = asyncio.get_running_loop().create_future()
    futures.append(future)
    return await future


async def _answer(futures: list[asyncio.Future[str]], calls: int) -> None:
    answered = 0
    while answered < calls:
        for future in futures[answered : answered + BARE_SLICE]:
            future.set_result("")
            answered += 1
        await asyncio.sleep(0)


async def measure(kind: str, calls: int, url: str, *, freeze: bool) -> Stalls:
    """Start ``calls`` at once and wait for all."""
    program = "import math\nprint(math.factorial(10))  # call number {}\n"
    programs = [program.format(number) for number in range(calls)]
    requests, before = 0, {"requests": 0.0}
    async with rollyard.AsyncClient(
        url, transport="aiohttp" if kind == "aiohttp" else "httpx2"
    ) as client:
        if kind != "bare":
            before = await client.stats()
            await client.run("print(1)")  # connections, imports and caches as in a running trainer
        waiting: list[asyncio.Future[str]] = []
        start: Callable[[str], Coroutine[Any, Any, object]] = client.run
        if kind == "bare":
            start = functools.partial(_bare, waiting)
        gc.collect()
        if freeze:
            gc.freeze()
        pauses = Collections()
        heart = Heartbeat()
        await asyncio.sleep(0.05)
        heart.wall_s = heart.cpu_s = 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        # As a trainer does: all in one statement.
        answering = asyncio.create_task(_answer(waiting, calls)) if kind == "bare" else None
        if kind == "run_all":
            results: Sequence[object] = await client.run_all(programs)
        else:
            results = await asyncio.gather(*(start(code) for code in programs))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        await asyncio.sleep(2 * BEAT_S)
        heart.stop()
        if answering is not None:
            await answering
        else:
            assert all(isinstance(one, rollyard.RunResult) and one.ok for one in results)
            after = await client.stats()
            requests = int(after["requests"] - before["requests"]) - 1
    return Stalls(
        kind=kind,
        calls=calls,
        stall_ms=heart.wall_s * 1e3,
        stall_cpu_ms=heart.cpu_s * 1e3,
        gc_ms=pauses.longest_s * 1e3,
        total_ms=wall * 1e3,
        cpu_ms=cpu * 1e3,
        calls_per_s=calls / wall,
        requests=requests,
    )


class Gateway:
    """A null gateway in a process of its own; use with ``with``."""

    def __init__(self, *options: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rollyard-null-")
        self._socket = Path(self._directory.name, "gateway.sock")
        self._options = options

    def __enter__(self) -> str:
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "rollyard_loadtest.null_gateway",
             "--uds", str(self._socket), *self._options]
        )  # fmt: skip
        give_up = time.monotonic() + READY_S
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(self._socket))) as client:
            while True:
                try:
                    client.get("http://localhost/v1/stats")
                    return f"unix://{self._socket}"
                except httpx2.HTTPError:
                    if self._process.poll() is not None or time.monotonic() > give_up:
                        raise
                    time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._directory.cleanup()


def in_fresh_process(kind: str, calls: int, url: str, *, freeze: bool) -> Stalls:
    """Measure where no earlier measurement has left objects or warm caches."""
    command = [sys.executable, "-m", "rollyard_loadtest.sdk_stall", "--one", kind, str(calls), url]
    command += ["--freeze"] if freeze else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return Stalls(**json.loads(done.stdout))


def _line(row: Stalls) -> str:
    return (
        f"{row.kind:8} {row.calls:6} {row.stall_ms:9.1f} {row.stall_cpu_ms:9.1f} {row.gc_ms:7.1f}"
        f" {row.total_ms:9.0f} {row.cpu_ms:8.0f} {row.calls_per_s:9.0f} {row.requests:9}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", default="1000,10000,45000", help="how many at once, each")
    parser.add_argument("--kinds", default=",".join(KINDS), help="floor and transports")
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many is shown")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="of the gateway's answers")
    parser.add_argument("--freeze", action="store_true", help="gc.freeze() before it starts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "CALLS", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, calls, url = options.one
        measured = asyncio.run(measure(kind, int(calls), url, freeze=options.freeze))
        print(json.dumps(asdict(measured)))  # noqa: T201
        return
    rows: list[Stalls] = []
    say = sys.stderr.write if options.json else sys.stdout.write
    say("kind      calls  stall ms  (of CPU)  gc ms  total ms   CPU ms   calls/s  requests\n")
    with Gateway("--delay-ms", str(options.delay_ms)) as url:
        for calls in map(int, options.calls.split(",")):
            for kind in options.kinds.split(","):
                tries = [
                    in_fresh_process(kind, calls, url, freeze=options.freeze)
                    for _ in range(options.repeat)
                ]
                rows.append(min(tries, key=lambda row: row.stall_ms))
                say(_line(rows[-1]) + "\n")
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
