"""``scripts/bench``: what a run costs in each part of the service, beside the floor.

    python -m rollyard_loadtest.parts [--runs N] [--json]

Everything is measured in one process tree on one machine in one go; compare ratios, not times.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import rollyard
from rollyard_loadtest.processes import Usage, descendants, usage
from rollyard_loadtest.programs import PROGRAMS, Program

_WARM_RUNS = 128


@dataclass
class Row:
    """One program's figures; CPU in milliseconds a run."""

    program: str
    runs_per_s: float
    floor_cpu_ms: float
    worker_cpu_ms: float
    slots_cpu_ms: float
    gateway_cpu_ms: float
    valkey_cpu_ms: float
    sdk_cpu_ms: float
    wall_p50_ms: float
    wall_p99_ms: float
    queued_p50_ms: float
    queued_p99_ms: float

    @property
    def ratio(self) -> float:
        """Worker side (worker, slots and programs) as a multiple of the floor."""
        return (self.worker_cpu_ms + self.slots_cpu_ms) / self.floor_cpu_ms


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def floor_cpu_ms(program: Program, image: Path, runs: int) -> float:
    """CPU of the floor for this program, in milliseconds a run, with every core busy at it."""
    environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [
        str(image / "opt/python/bin/python3"), str(Path(__file__).with_name("floor.py")),
        program.code, " ".join(program.modules), str(runs),
    ]  # fmt: skip
    # One for each core, as the service is measured: two threads of one core slow each other.
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: S603
        for _ in os.sched_getaffinity(0)
    ]
    answers = [json.loads(one.communicate()[0])["cpu_ms"] for one in running]
    return sum(answers) / len(answers)


class Parts:
    """The processes of a local service, by part."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids

    def now(self, *, memory: bool = False) -> dict[str, Usage]:
        found: dict[str, Usage] = {}
        for name, pid in self._pids.items():
            kind = name.split("-")[0]
            if kind == "worker":
                below = descendants(pid)[1:]
                found["worker"] = usage([pid], memory=memory)
                found["slots"] = usage(below, memory=memory)
            elif kind in ("gateway", "valkey"):
                found[kind] = usage([pid], memory=memory)
        return found


def measure(client: rollyard.Client, parts: Parts, program: Program, image: Path, runs: int) -> Row:
    """Run one program ``runs`` times in batches of 64 and share out the CPU."""
    floor_ms = floor_cpu_ms(program, image, max(50, runs // 10))
    _all(client, program, _WARM_RUNS)
    before, own = parts.now(), time.process_time()
    started = time.perf_counter()
    results = _all(client, program, runs)
    elapsed_s = time.perf_counter() - started
    after, own = parts.now(), time.process_time() - own
    cpu_ms = {name: (after[name].cpu_s - before[name].cpu_s) / runs * 1e3 for name in after}
    walls, queued = [r.wall_ms for r in results], [r.queued_ms for r in results]
    return Row(
        program=program.title,
        runs_per_s=runs / elapsed_s,
        floor_cpu_ms=floor_ms,
        worker_cpu_ms=cpu_ms["worker"],
        slots_cpu_ms=cpu_ms["slots"],
        gateway_cpu_ms=cpu_ms["gateway"],
        valkey_cpu_ms=cpu_ms["valkey"],
        sdk_cpu_ms=own / runs * 1e3,
        wall_p50_ms=_quantile(walls, 0.5),
        wall_p99_ms=_quantile(walls, 0.99),
        queued_p50_ms=_quantile(queued, 0.5),
        queued_p99_ms=_quantile(queued, 0.99),
    )


def _all(client: rollyard.Client, program: Program, runs: int) -> list[rollyard.RunResult]:
    results = client.run_all([program.code] * runs)
    wrong = Counter(r.outcome for r in results if r.stdout != program.stdout)
    if wrong:
        raise SystemExit(f"{program.name}: wrong results {dict(wrong)}; {results[0]}")
    return results


def memory(client: rollyard.Client, parts: Parts, slots: int) -> Iterator[tuple[str, float]]:
    """Proportional set size in MiB: each part idle, and what one more slot adds."""
    idle = parts.now(memory=True)
    for name, part in idle.items():
        yield f"{name} PSS, {part.processes} processes", part.pss_bytes / 2**20
    for template in ("bare", "science"):
        before = parts.now(memory=True)["slots"]
        sleeping = [{"code": "import time; time.sleep(1.5)", "template": template}] * slots
        client.run_all(sleeping)
        after = parts.now(memory=True)["slots"]
        added = after.processes - before.processes
        if added > 0:
            grown = (after.pss_bytes - before.pss_bytes) / added / 2**20
            yield f"one more {template} slot, PSS", grown


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="runs of print; others do fewer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    service = rollyard.local()
    rows: list[Row] = []
    with service as client:
        client.run("print(1)").raise_for_outcome()
        first_result_s = time.perf_counter() - started
        parts = Parts(service.pids)
        image = _image()
        slots = int(client.stats()["slots"])
        memories = list(memory(client, parts, slots))
        for program, share in zip(PROGRAMS, (1, 3, 10), strict=True):
            runs = max(100, options.runs // share)
            rows.append(measure(client, parts, program, image, runs))
            if not options.json:
                sys.stderr.write(f"measured {program.title}\n")
    facts = {"cores": len(os.sched_getaffinity(0)), "first_result_s": first_result_s}
    if options.json:
        figures = {**facts, "memory": dict(memories),
                   "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}  # fmt: skip
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        sys.stdout.write(_report(rows, memories, facts))
    return 0


def _image() -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "rollyard_sandbox.image"], capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip())


def _report(rows: list[Row], memories: list[tuple[str, float]], facts: dict[str, float]) -> str:
    lines = [
        f"{facts['cores']} cores; first result {facts['first_result_s']:.1f} s after the start",
        "",
        "| program | runs/s | floor | slot + child | worker | ÷ floor | gateway | Valkey | SDK |"
        " wall p50/p99 ms | queued p50/p99 ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.program} | {r.runs_per_s:.0f} | {r.floor_cpu_ms:.2f} | {r.slots_cpu_ms:.2f} |"
        f" {r.worker_cpu_ms:.2f} | {r.ratio:.2f} | {r.gateway_cpu_ms:.2f} | {r.valkey_cpu_ms:.2f} |"
        f" {r.sdk_cpu_ms:.2f} | {r.wall_p50_ms:.1f}/{r.wall_p99_ms:.1f} |"
        f" {r.queued_p50_ms:.0f}/{r.queued_p99_ms:.0f} |"
        for r in rows
    ]
    lines += ["", "CPU in ms a run. Floor: fork, exec(compile), wait in the same warm interpreter."]
    lines += ["", *(f"- {what}: {mib:.1f} MiB" for what, mib in memories)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
