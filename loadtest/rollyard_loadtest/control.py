"""``scripts/bench --control-plane``: gateway and queue alone, with a worker that runs nothing.

    python -m rollyard_loadtest.control [--only whole,stream,single,plain,burst,overload]

Load generator, gateway, Valkey and null worker share this machine's cores; CPU is told for each in
microseconds a run. Every run id that was sent must come back once with outcome ``ok``, else the
benchmark fails. ``plain`` is a handler as one would write it in an afternoon (``plain.py``).
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from rollyard._up import Plan
from rollyard.local import LocalService
from rollyard_loadtest.control_client import Driver, Tally, request_template
from rollyard_loadtest.processes import usage

BATCH = 64
IN_FLIGHT = 45_000
CODE = "print(1+1)"
WITHIN_S = 120.0
WARM_SHARE = 0.2
OVERLOAD_SLOTS, OVERLOAD_SERVICE_S = 100, 0.05
OVERLOAD_WAIT_S = 1.0  # ROLLYARD_MAX_QUEUED_WAIT_S
OVERLOAD_SETTLE_S, OVERLOAD_S = 4.0, 6.0


@dataclass
class Figures:
    """One measurement; CPU in microseconds a run."""

    what: str
    connections: int
    runs: int
    runs_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: dict[str, float] = field(default_factory=dict[str, float])

    def line(self) -> str:
        """A row of the table."""
        parts = " | ".join(f"{self.cpu_us.get(name, 0):.1f}" for name in PARTS)
        return (
            f"| {self.what} | {self.connections} | {self.runs} | {self.runs_per_s:,.0f} |"
            f" {self.p50_ms:.0f}/{self.p99_ms:.0f} | {parts} |"
        )


PARTS = ("client", "gateway", "valkey", "worker")
HEAD = (
    "| what | connections | runs | runs/s | p50/p99 ms | client | gateway | Valkey | worker |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


type Stack = tuple[str, dict[str, int]]  # the gateway's socket, and the parts' process ids


@contextmanager
def ours(*, service_ms: float = 0.0, slots: int | None = None) -> Generator[Stack]:
    """Valkey, one gateway and a null worker; the gateway's socket and the parts' pids."""
    plan = Plan(
        null_for_benchmarks=True, null_service_ms=service_ms, slots=slots, sealed=True,
        stop_timeout_s=10.0,
    )  # fmt: skip
    service = LocalService(plan).start()
    try:
        yield service.address.removeprefix("unix://"), service.pids
    finally:
        service.stop()


@contextmanager
def plain() -> Generator[Stack]:
    """The plain service of ``plain.py``, on a Valkey of its own."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        queue, uds = f"{directory}/valkey.sock", f"{directory}/gateway.sock"
        pids: dict[str, int] = {}

        def start(name: str, *arguments: str) -> None:
            command = [sys.executable, "-m", *arguments]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603
            stack.callback(process.wait)
            stack.callback(process.terminate)
            pids[name] = process.pid

        redis = f"unix://{queue}"
        start("valkey", "rollyard_queue", "--socket", queue)
        _await_socket(queue)
        start("worker", "rollyard_loadtest.plain", "worker", "--redis", redis)
        start("gateway", "rollyard_loadtest.plain", "gateway", "--redis", redis, "--uds", uds)
        _await_socket(uds)
        yield uds, pids


def _await_socket(path: str) -> None:
    end = time.monotonic() + 30
    while not Path(path).is_socket():
        if time.monotonic() > end:
            raise SystemExit(f"nothing listens at {path}")
        time.sleep(0.05)


def _quantile_ms(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] * 1e3


def _cpu_s(pids: dict[str, int]) -> dict[str, float]:
    parts = {name: usage([pids[name]]).cpu_s for name in PARTS if name in pids}
    return {"client": time.process_time(), **parts}


# Each measurement has ids of its own: the queue remembers results for a minute.
_numbers = itertools.count(0, 1_000_000)


@dataclass
class Case:
    """What to send to whom."""

    what: str
    path: str
    connections: int
    batch: int = BATCH
    stream: bool = False
    ids: bool = True


async def measure(case: Case, requests: int, uds: str, pids: dict[str, int]) -> Figures:
    """Warm up, then ``requests`` requests in a closed loop over all connections."""
    template = request_template(
        path=case.path, batch=case.batch, stream=case.stream, code=CODE, ids=case.ids
    )
    driver = Driver(uds=uds, template=template, batch=case.batch, has_ids=case.ids)
    await driver.open(case.connections)
    try:
        warm, first = max(case.connections, int(requests * WARM_SHARE)), next(_numbers)
        check_complete(
            case, await driver.run(requests=warm, first_number=first, within_s=WITHIN_S), warm
        )
        before, started = _cpu_s(pids), time.perf_counter()
        tally = await driver.run(requests=requests, first_number=first + warm, within_s=WITHIN_S)
        elapsed_s, after = time.perf_counter() - started, _cpu_s(pids)
        check_complete(case, tally, requests)
    finally:
        driver.close()
    return Figures(
        what=case.what,
        connections=case.connections,
        runs=tally.runs,
        runs_per_s=tally.runs / elapsed_s,
        p50_ms=_quantile_ms(tally.latencies_s, 0.5),
        p99_ms=_quantile_ms(tally.latencies_s, 0.99),
        cpu_us={name: (after[name] - before[name]) / tally.runs * 1e6 for name in after},
    )


def check_complete(case: Case, tally: Tally, requests: int) -> None:
    """End the benchmark unless every run was answered ok."""
    if tally.refused or tally.wrong or tally.runs != requests * case.batch:
        raise SystemExit(
            f"{case.what}: of {requests * case.batch} runs {tally.runs} were answered ok;"
            f" refused {tally.refused}, wrong {tally.wrong}"
        )


def _batches(options: argparse.Namespace, *, stream: bool) -> list[Figures]:
    rows: list[Figures] = []
    with ours() as (uds, pids):
        for connections in options.connections:
            what = f"batches of {BATCH}, {'NDJSON' if stream else 'whole'}"
            case = Case(what, "/v1/batches", connections, stream=stream)
            requests = max(4 * connections, options.runs // BATCH)
            rows.append(uvloop.run(measure(case, requests, uds, pids)))
    return rows


def whole(options: argparse.Namespace) -> list[Figures]:
    """Batches answered when all is done."""
    return _batches(options, stream=False)


def stream(options: argparse.Namespace) -> list[Figures]:
    """Batches answered line by line."""
    return _batches(options, stream=True)


def single(options: argparse.Namespace) -> list[Figures]:
    """One run a request."""
    with ours() as (uds, pids):
        case = Case("single calls", "/v1/runs", 64, batch=1)
        return [uvloop.run(measure(case, max(64, options.runs // 10), uds, pids))]


def plain_single(options: argparse.Namespace) -> list[Figures]:
    """One run a request, the plain handler."""
    with plain() as (uds, pids):
        case = Case("single calls, plain FastAPI and redis", "/run", 64, batch=1, ids=False)
        return [uvloop.run(measure(case, max(64, options.runs // 40), uds, pids))]


def burst(options: argparse.Namespace) -> list[Figures]:
    """All runs handed in at one moment, each batch on a connection of its own."""
    connections = -(-IN_FLIGHT // BATCH)
    with ours() as (uds, pids):
        rows: list[Figures] = []
        for is_stream in (False, True):
            what = f"burst of {connections * BATCH} at once, {'NDJSON' if is_stream else 'whole'}"
            case = Case(what, "/v1/batches", connections, stream=is_stream)
            rows.append(uvloop.run(measure(case, connections, uds, pids)))
        return rows


def overload(options: argparse.Namespace) -> list[Figures]:
    """Open loop from half to three times a known capacity; refused requests are not sent again."""
    capacity = OVERLOAD_SLOTS / OVERLOAD_SERVICE_S
    rows: list[Figures] = []
    with _environment(ROLLYARD_MAX_QUEUED_WAIT_S=str(OVERLOAD_WAIT_S)):
        for times in (0.5, 1.0, 2.0, 3.0):
            with ours(service_ms=OVERLOAD_SERVICE_S * 1e3, slots=OVERLOAD_SLOTS) as (uds, pids):
                case = Case(
                    f"{times:g} of capacity ({capacity:.0f}/s)", "/v1/batches", 256, batch=8
                )
                rows.append(uvloop.run(_paced(case, capacity * times, uds, pids)))
    return rows


async def _paced(case: Case, runs_per_s: float, uds: str, pids: dict[str, int]) -> Figures:
    template = request_template(path=case.path, batch=case.batch, stream=False, code=CODE)
    driver = Driver(uds=uds, template=template, batch=case.batch)
    await driver.open(case.connections)
    per_s = runs_per_s / case.batch
    try:
        # Until the queue's rate is known and its length has settled.
        await driver.pace(requests=int(per_s * OVERLOAD_SETTLE_S), per_s=per_s,
                          first_number=next(_numbers), within_s=WITHIN_S)  # fmt: skip
        before, started = _cpu_s(pids), time.perf_counter()
        tally = await driver.pace(requests=int(per_s * OVERLOAD_S), per_s=per_s,
                                  first_number=next(_numbers), within_s=WITHIN_S)  # fmt: skip
        # Until the last answer: what was queued at the end is drained within it.
        elapsed_s, after = time.perf_counter() - started, _cpu_s(pids)
    finally:
        driver.close()
    if tally.wrong or set(tally.refused) - {503}:
        raise SystemExit(f"{case.what}: wrong {tally.wrong}, refused {tally.refused}")
    refused = sum(tally.refused.values())
    told = f", {refused * case.batch} refused"
    if tally.refusals_s:
        told += f" in p99 {_quantile_ms(tally.refusals_s, 0.99):.0f} ms"
    return Figures(
        what=case.what + told,
        connections=case.connections,
        runs=tally.runs,
        runs_per_s=tally.runs / elapsed_s,
        p50_ms=_quantile_ms(tally.latencies_s, 0.5),
        p99_ms=_quantile_ms(tally.latencies_s, 0.99),
        cpu_us={name: (after[name] - before[name]) / tally.runs * 1e6 for name in after},
    )


@contextmanager
def _environment(**variables: str) -> Generator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Figures]]] = {
    "whole": whole,
    "stream": stream,
    "single": single,
    "plain": plain_single,
    "burst": burst,
    "overload": overload,
}


def main() -> int:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(prog="scripts/bench --control-plane", description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma separated")
    parser.add_argument("--runs", type=int, default=200_000, help="runs of each batch measurement")
    parser.add_argument(
        "--connections", type=lambda text: [int(one) for one in text.split(",")],
        default=[16, 64], help="keep-alive connections, comma separated",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names: list[str] = options.only.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--only: {', '.join(sorted(unknown))}; known are {', '.join(SECTIONS)}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows: list[Figures] = []
    if not options.json:
        print(f"{len(os.sched_getaffinity(0))} cores; CPU in µs a run\n\n{HEAD}")  # noqa: T201
    for name in names:
        for row in SECTIONS[name](options):
            rows.append(row)
            if not options.json:
                print(row.line(), flush=True)  # noqa: T201
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
