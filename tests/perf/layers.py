"""``scripts/layers``: what each layer of the sandbox costs, in µs, with it and without.

    python tests/perf/layers.py [--runs N] [--slots N] [--only LAYER…] [--json]

For each layer two machines stand side by side, of which one lacks it: the same source with one
line changed, as the tests of `rollyard doctor` take walls down. Runs and new slots of the two are
measured in turn, in blocks, so that what else the machine does meets both; a figure is the median
of the blocks' differences. CPU is that of the slot's control group and of the worker's process.
Never serve anything from a machine that lacks a layer.
"""

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from changed_guest import change_guest

from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox import execution, jail, machine
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.machine import Machine, open_machine
from rollyard_sandbox.pool import FRESH
from rollyard_sandbox.settings import WorkerSettings

_DISK = 64 << 20
_BLOCKS = 12
_LIMITS = LimitsSpec(timeout_s=30.0, cpu_s=None, memory_bytes=512 << 20, disk_bytes=_DISK, pids=64,
                     output_bytes=65536)  # fmt: skip

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Layer:
    """``change``: file, text and what replaces it in the guest; or what ``host`` does."""

    what: str
    changes: tuple[tuple[str, str, str], ...] = ()
    host: Callable[[Patch], None] | None = None


def _no_tree_filter(patch: Patch) -> None:
    real = jail.configuration

    def changed(*arguments: Any) -> Any:
        return dataclasses.replace(real(*arguments), seccomp_string=[])

    patch.setattr(jail, "configuration", changed)


def _nothing(*_: object) -> None:
    return None


def _no_groups(patch: Patch) -> None:
    patch.setattr(machine, "_cgroups", _nothing)


def _no_owner(patch: Patch) -> None:
    patch.setattr(execution.os, "fchown", _nothing)


async def _no_probe(*_: object) -> list[Any]:
    """The self-check would end at what is missing."""
    return []


LAYERS = {
    "nothing": Layer("the same machine twice: how far noise reaches"),
    "network namespace": Layer("of each slot", (("slot.py", " | os.CLONE_NEWNET", ""),)),
    "ipc, uts namespaces": Layer(
        "of each slot",
        (("slot.py", "os.CLONE_NEWIPC | ", ""), ("slot.py", " | os.CLONE_NEWUTS", "")),
    ),
    "cgroup namespace": Layer("of each slot", (("slot.py", "os.unshare(os.CLONE_NEWCGROUP)", ""),)),
    "control group": Layer("memory, pids, cpuacct; the watchdog instead", host=_no_groups),
    "filter of the slot": Layer(
        "guest/filter.py", (("slot.py", "if filter.supported():", "if False:"),)
    ),
    "filter of the tree": Layer("tree.kafel", host=_no_tree_filter),
    "landlock": Layer("guest/landlock.py", (("slot.py", "landlock.restrict()", "pass"),)),
    "emptying the box": Layer(
        "and proving it empty", (("slot.py", "clean = self._tidy(", "clean = True or self._tidy("),)
    ),
    "user of the program": Layer(
        "setgroups, setresgid, setresuid, dumpable",
        (
            ("child.py", "    os.setgroups(())\n", ""),
            ("child.py", "    os.setresgid(uid, uid, uid)\n", ""),
            ("child.py", "    os.setresuid(uid, uid, uid)\n", ""),
        ),
    ),
    "resource limits": Layer(
        "of each run",
        (("child.py", "resource.setrlimit(resource.RLIMIT_", "(resource.RLIMIT_"),),
    ),
    "killing all": Layer(
        "kill(-1) after each run", (("slot.py", "os.kill(-1, signal.SIGKILL)", "pass"),)
    ),
    "closing descriptors": Layer(
        "all but 0, 1, 2", (("child.py", "    os.closerange(3, 1 << 30)\n", ""),)
    ),
    "owner of the pipes": Layer("so that /dev/stdin can be opened", host=_no_owner),
}  # fmt: skip


# One machine, in a process of its own -------------------------------------------------------------


def _spec(isolation: str = "warm") -> RunSpec:
    return RunSpec(
        run_id="layers", code="print(1)", stdin=None, files={}, fetch_files=[], limits=_LIMITS,
        template="bare", on_output_limit="truncate", job="layers",
        isolation="fresh" if isolation == "fresh" else "warm",
    )  # fmt: skip


async def _runs(opened: Machine, count: int, isolation: str = "warm") -> dict[str, float]:
    """Wall and CPU µs of a run: the lower quartile of ``count`` of them, one after another."""
    walls: list[float] = []
    cpus: list[float] = []
    template = FRESH if isolation == "fresh" else "bare"
    for _ in range(count):
        before, own = time.perf_counter(), time.process_time()
        slot = await opened.pool.acquire(template, _DISK)
        report, _ = await Execution(slot, _spec(isolation)).run()
        assert report.stdout == "1\n", report
        cpu_s = (slot.cpu_s() or 0.0) + time.process_time() - own
        await opened.pool.release(slot)
        walls.append((time.perf_counter() - before) * 1e6)
        cpus.append(cpu_s * 1e6)
    return {"wall": _quartile(walls), "cpu": _quartile(cpus)}


def _quartile(values: list[float]) -> float:
    """What the rest of the machine does only ever adds."""
    return sorted(values)[len(values) // 4]


async def _slots(opened: Machine, count: int) -> dict[str, float]:
    """Wall µs until a new slot is ready."""
    walls: list[float] = []
    for _ in range(count):
        before = time.perf_counter()
        slot = await opened.pool.acquire("bare", _DISK, new=True)
        walls.append((time.perf_counter() - before) * 1e6)
        slot.usable = False
        await opened.pool.release(slot)
    return {"slot": _quartile(walls)}


async def _serve() -> None:
    chosen = WorkerSettings(slots=2, templates="bare")
    async with open_machine(chosen, say=lambda _: None) as opened:
        await _runs(opened, 20)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while line := await asyncio.to_thread(sys.stdin.readline):
            what, count = line.split()
            if what == "slots":
                answer = await _slots(opened, int(count))
            else:
                answer = await _runs(opened, int(count), what)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def _be(name: str) -> None:
    layer = LAYERS[name]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for number, (file, old, new) in enumerate(layer.changes):
            change_guest(patch, Path(folder) / str(number), file, old, new)
        Path(folder).chmod(0o755)
        patch.setattr(machine, "probe", _no_probe)
        if layer.host is not None:
            layer.host(patch)
        asyncio.run(_serve())


class _Other:
    """A machine in another process."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--be", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a machine ended with exit code {self._process.wait()}")
        return line

    def ask(self, what: str, count: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {count}\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# Two of them beside each other ------------------------------------------------------------------


def compare(name: str, runs: int, slots: int) -> dict[str, float]:
    """What the layer adds, and what a run and a slot cost with it; all in µs."""
    whole, without = _Other("nothing"), _Other(name)
    try:
        blocks: list[dict[str, float]] = []
        wholes: list[dict[str, float]] = []
        for number in range(_BLOCKS):
            pair = [whole, without] if number % 2 else [without, whole]
            got = {
                one: one.ask("warm", max(1, runs // _BLOCKS))
                | one.ask("slots", max(1, slots // _BLOCKS))
                for one in pair
            }
            blocks.append({key: got[whole][key] - got[without][key] for key in got[whole]})
            wholes.append(got[whole])
    finally:
        whole.end()
        without.end()
    added = {key: median(block[key] for block in blocks) for key in blocks[0]}
    return added | {f"whole_{key}": median(one[key] for one in wholes) for key in wholes[0]}


def fresh(runs: int) -> dict[str, float]:
    """Runs a second one after another, in a warm template and in a jail for each."""
    whole = _Other("nothing")
    try:
        return {
            "warm_runs_per_s": 1e6 / whole.ask("warm", runs)["wall"],
            "fresh_runs_per_s": 1e6 / whole.ask("fresh", max(5, runs // 10))["wall"],
        }
    finally:
        whole.end()


def _row(name: str, one: dict[str, float]) -> str:
    cpu = "" if name == "control group" else f"{one['cpu']:+.0f}"  # it is what measures
    return (
        f"| {name} | {LAYERS[name].what} | {one['wall']:+.0f} | {cpu} | {one['slot']:+.0f} |"
        f" {one['whole_wall']:.0f} | {one['whole_slot']:.0f} |\n"
    )


def main() -> int:
    """Print the table as it grows, or JSON at the end."""
    if sys.argv[1:2] == ["--be"]:
        _be(sys.argv[2])
        return 0
    parser = argparse.ArgumentParser(
        prog="scripts/layers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=600, help="of each machine")
    parser.add_argument("--slots", type=int, default=48, help="new ones, of each machine")
    parser.add_argument("--only", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        sys.stdout.write(
            "| layer | | wall µs a run | CPU µs a run | µs a new slot | whole: wall | new slot |\n"
            "|---|---|---|---|---|---|---|\n"
        )
    found: dict[str, dict[str, float]] = {}
    for name in options.only:
        found[name] = compare(name, options.runs, options.slots)
        if not options.json:
            sys.stdout.write(_row(name, found[name]))
            sys.stdout.flush()
    rates = fresh(options.runs)
    if options.json:
        sys.stdout.write(json.dumps({"layers": found, **rates}, indent=1) + "\n")
    else:
        sys.stdout.write(
            f"\nOne after another: warm {rates['warm_runs_per_s']:.0f} runs/s, "
            f"fresh {rates['fresh_runs_per_s']:.1f} runs/s.\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
