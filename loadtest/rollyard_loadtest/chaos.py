"""``scripts/chaos``: kill, freeze and replace the parts of a service while callers go on.

    python -m rollyard_loadtest.chaos [--minutes 3] [--seed 1] [--output chaos]

Starts a service of its own, with several gateways and workers around one embedded server, loads
it with programs whose right answers are known, and harms its parts at random. At the end every
call must have been answered, once, and rightly; ``infra_error`` only where a run lost its worker
three times; and nothing may be left of it on this machine. Exit code 1 when anything is wrong.

What is promised when the server itself is killed: it holds everything in memory, so queue and
stored results are gone. Each gateway then hands in again what its callers still wait for, and a
caller whose gateway died does so through the SDK's retry, under the same run id. So no caller
waits in vain; but a run may be executed a second time although the first execution had ended, and
who asks for a result that was already fetched gets a new execution's.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rollyard_loadtest.chaos_aftermath import key_faults, machine_faults, machine_state
from rollyard_loadtest.chaos_faults import Tormentor, draw_faults
from rollyard_loadtest.chaos_load import Load
from rollyard_loadtest.chaos_report import Report, text, write
from rollyard_loadtest.chaos_stack import Stack, StackPlan

_RECOVERY_S = 60.0


async def chaos(options: argparse.Namespace) -> Report:
    """One whole run; the service is gone when this returns."""
    plan = StackPlan(
        gateways=options.gateways, workers=options.workers, slots=options.slots,
        shards=options.shards,
        lease_s=options.lease_s, templates=tuple(options.templates.split(",")),
    )  # fmt: skip
    _build_image(options.templates)
    before = machine_state()
    # A short path: unix sockets have room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rollyard-chaos-", ignore_cleanup_errors=True) as made:
        directory = Path(made)
        stack = Stack(plan, directory)
        _say("starting the parts")
        async with stack:
            report = await _harm(stack, options)
            report.not_recovered = await stack.recovered(_RECOVERY_S)
            report.left = await asyncio.to_thread(key_faults, stack.server_socket)
        report.stopped_badly = [name for name, well in stack.stopped_well.items() if not well]
        pids = {pid for part in stack.workers for pid in part.pids}
        report.left += await asyncio.to_thread(machine_faults, before, pids, directory)
        for part in stack.parts:
            report.tracebacks += part.tracebacks
            report.events |= {f"{part.name} {event}": n for event, n in part.said.items() if event}
        if report.problems() and options.keep_logs:
            _keep_logs(directory, Path(f"{options.output}-logs"))
    return report


async def _harm(stack: Stack, options: argparse.Namespace) -> Report:
    started = time.monotonic()

    def now_s() -> float:
        return time.monotonic() - started

    faults = draw_faults(
        until_s=options.minutes * 60, every_s=options.every_s, lease_s=options.lease_s,
        seed=options.seed,
    )  # fmt: skip
    tormentor = Tormentor(stack, faults, now_s)
    load = Load(
        stack.addresses, callers=options.callers, seed=options.seed, lease_s=options.lease_s,
        science="science" in options.templates, now_s=now_s, forgotten=tormentor.forgotten,
    )  # fmt: skip
    harming = asyncio.create_task(tormentor.run())
    loading = asyncio.create_task(load.run(until=harming.done))
    showing = asyncio.create_task(_show(load, tormentor, now_s))
    try:
        await asyncio.wait({harming, loading}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (harming, loading):
            if task.done():
                task.result()
        await loading
    finally:
        for task in (harming, loading, showing):
            task.cancel()
        await asyncio.gather(harming, loading, showing, return_exceptions=True)
        sys.stderr.write("\n")
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    return Report(settings, now_s(), load.ledger, tormentor.done)


async def _show(load: Load, tormentor: Tormentor, now_s: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(1)
        entries = load.ledger.entries
        waiting = len(load.ledger.open())
        bad = sum(bool(entry.problem) for entry in entries) + len(load.ledger.duplicated)
        harmed = [part.name for part in tormentor.stack.parts if part.lock.locked()]
        line = (
            f"{now_s():.0f} s: {len(entries) - waiting} answered, {waiting} waiting, {bad} wrong,"
            f" {len(tormentor.done)} of {len(tormentor.faults)} faults {' '.join(harmed)}"
        )
        sys.stderr.write(f"\r{line:<110}")
        sys.stderr.flush()


def _build_image(templates: str) -> None:
    """Build the guest image if need be, so that no part's start waits for it."""
    _say("guest image")
    command = [sys.executable, "-m", "rollyard_sandbox.image", "--templates", templates]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit("the guest image could not be built; see 'rollyard doctor'")


def _keep_logs(directory: Path, place: Path) -> None:
    place.mkdir(exist_ok=True)
    for log in directory.glob("*.log"):
        shutil.copy(log, place)
    _say(f"the parts' logs are in {place}")


def _say(line: str) -> None:
    sys.stderr.write(f"chaos: {line}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to harm (3)")
    parser.add_argument("--seed", type=int, default=1, help="same seed: same programs and faults")
    parser.add_argument("--every-s", type=float, default=4.0, help="mean time between faults (4)")
    parser.add_argument("--lease-s", type=float, default=5.0, help="the workers' lease (5)")
    parser.add_argument("--callers", type=int, default=24, help="calls under way at once (24)")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="of each worker (8)")
    parser.add_argument("--shards", type=int, default=1, help="of the queue (1)")
    parser.add_argument("--templates", default="bare,science", help="(bare,science)")
    parser.add_argument("--keep-logs", action="store_true", help="keep the parts' logs if it fails")
    parser.add_argument("--output", default="chaos", help="prefix of .json, .png and .html (chaos)")
    return parser


def main() -> int:
    """Exit code 0: nothing lost, duplicated, wrong or left; 1: something was; 2: usage."""
    parser = _parser()
    options = parser.parse_args()
    if options.gateways < 2 or options.workers < 1 or options.lease_s < 1:
        parser.error("it takes two gateways, a worker, and leases of at least a second")
    report = asyncio.run(chaos(options))
    sys.stdout.write(text(report))
    _say("wrote " + ", ".join(str(path) for path in write(report, options.output)))
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
