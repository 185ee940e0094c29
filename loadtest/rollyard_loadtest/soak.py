"""``scripts/soak``: many mixed runs, hostile ones among them, and whether anything grows.

    python -m rollyard_loadtest.soak [--runs N] [--output PREFIX]

The load pauses for each sample, so that what is counted is what stays, not what runs. Ctrl-C (or
SIGTERM) ends it after the round that runs, with everything that there is by then; a second one at
once. Figures are also written every few minutes. Exit code 1: something grew beyond its
noise, or a run had a wrong result; 130: ended before there was enough to tell.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import rollyard
from rollyard_loadtest.footprint import RESOURCES, Footprint
from rollyard_loadtest.growth import Growth, Sample, growth
from rollyard_loadtest.mix import Job, draw

_QUIET_PATIENCE_S = 10.0
_LOOK_S = 0.02
_CANCEL_EVERY_S = 0.1
_MAX_WRONG = 20
_WRITE_EVERY_S = 120.0


@dataclass
class Soak:
    """The state of one soak."""

    client: rollyard.AsyncClient
    footprint: Footprint
    in_flight: int
    seed: int
    samples: list[Sample] = field(default_factory=list[Sample])
    kinds: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    restarted: int = 0
    """Runs that were delivered more than once: a part of the service died."""
    started: float = field(default_factory=time.monotonic)
    interrupted: bool = False

    def interrupt(self) -> None:
        """End after this round; called once more, at once."""
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        sys.stderr.write("\nending after this round; once more to end at once\n")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    async def run(
        self, runs: int, samples: int, max_s: float, write: Callable[["Soak", int], object]
    ) -> int:
        """Run until ``runs`` are done, the time is over or it is interrupted; return how many were.

        ``write`` is called from time to time, so that a machine that goes down takes little along.
        """
        each = max(1, runs // samples)
        done = 0
        written = self.elapsed_s
        self._sample(0)
        while done < runs and self.elapsed_s < max_s and not self.interrupted:
            numbers = range(done, min(done + each, runs))
            await self._round(draw(numbers, self.seed))
            done = numbers.stop
            await self._until_quiet()
            self._sample(done)
            self._tell(done, runs)
            if self.elapsed_s - written > _WRITE_EVERY_S:
                write(self, done)
                written = self.elapsed_s
            if len(self.wrong) >= _MAX_WRONG:
                break
        sys.stderr.write("\n")
        return done

    def _tell(self, done: int, runs: int) -> None:
        rate = done / self.elapsed_s
        left_min = (runs - done) / rate / 60
        sys.stderr.write(
            f"\r{done} of {runs} runs, {rate:.0f}/s, {left_min:.0f} min left, "
            f"{len(self.wrong)} wrong, slots and templates "
            f"{self.samples[-1].values['templates and slots PSS'] / (1 << 20):.0f} MiB   "
        )
        sys.stderr.flush()

    def _sample(self, runs: int) -> None:
        self.samples.append(Sample(runs, round(self.elapsed_s, 3), self.footprint.sample()))

    async def _round(self, jobs: list[Job]) -> None:
        waiting = iter(jobs)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.in_flight):
                tasks.create_task(self._take(waiting))

    async def _take(self, waiting: Iterator[Job]) -> None:
        for job in waiting:
            result = await self._answer(job)
            self.kinds[job.kind] += 1
            self.restarted += result.attempt > 1
            if problem := job.check(result):
                self.wrong.append(f"{job.kind} ({result.run_id}): {problem}")

    async def _answer(self, job: Job) -> rollyard.RunResult:
        if not job.cancel:
            return await self.client.run(**job.request)
        run_id = f"soak-cancelled-{next(_numbers)}"
        running = asyncio.create_task(self.client.run(**job.request, run_id=run_id))
        while not running.done():
            # Again until it is answered: the first may come before the run itself.
            await asyncio.wait([running], timeout=_CANCEL_EVERY_S)
            await self.client.cancel(run_id)
        return running.result()

    async def _until_quiet(self) -> None:
        deadline = time.monotonic() + _QUIET_PATIENCE_S
        while self.footprint.programs():
            if time.monotonic() > deadline:
                self.wrong.append("processes of runs are left although all are answered")
                return
            await asyncio.sleep(_LOOK_S)


_numbers = count()


async def soak(options: argparse.Namespace) -> tuple[Soak, int]:
    """Start a service, run the mix through it, stop it."""
    service = rollyard.local(slots=options.slots)
    async with service as client:
        directory = Path(service.address.removeprefix("unix://")).parent
        footprint = Footprint(service.pids, directory)
        state = Soak(client, footprint, options.in_flight, options.seed)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, state.interrupt)
        write = partial(_write, prefix=options.output)
        done = await state.run(options.runs, options.samples, options.max_s, write)
    return state, done


def _write(state: Soak, done: int, prefix: str) -> list[Growth]:
    """Write the figures; empty, and nothing written, while there are too few samples."""
    try:
        growths = [growth(state.samples, resource) for resource in RESOURCES]
    except ValueError:
        return []
    Path(f"{prefix}.json").write_text(json.dumps(_figures(growths, state, done), indent=1))
    return growths


def _draw(growths: list[Growth], samples: list[Sample], prefix: str) -> None:
    """Draw the plot, at the very end: the SDK's process is one of those that must not grow."""
    try:
        from rollyard_loadtest.plot import plot
    except ImportError:
        sys.stderr.write("no plot: pip install 'rollyard[bench]'\n")
    else:
        plot(growths, samples, Path(f"{prefix}.png"))


def _table(growths: list[Growth], state: Soak, done: int) -> str:
    lines = [
        f"{done} runs in {state.elapsed_s:.0f} s; {len(state.samples)} samples, taken at rest",
        "",
        "| resource | first | last | highest | per 10,000 runs | grew by | noise | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for g in growths:
        name = g.resource.name + (f", {g.resource.unit}" if g.resource.unit else "")
        noise = "" if g.resource.noise is None else f"{g.resource.noise:g}"
        mark = "" if not noise else "flat" if g.flat else "**GROWS**"
        lines.append(
            f"| {name} | {g.first:.1f} | {g.last:.1f} | {g.highest:.1f} | {g.per_10k:+.2f} |"
            f" {g.over_all:+.2f} | {noise} | {mark} |"
        )
    lines += ["", "Runs: " + ", ".join(f"{n} {kind}" for kind, n in state.kinds.most_common())]
    lines.append(f"Delivered more than once: {state.restarted}")
    return "\n".join(lines) + "\n"


def _figures(growths: list[Growth], state: Soak, done: int) -> dict[str, Any]:
    return {
        "runs": done,
        "interrupted": state.interrupted,
        "elapsed_s": round(state.elapsed_s, 1),
        "kinds": dict(state.kinds),
        "wrong": state.wrong,
        "restarted": state.restarted,
        "growth": [{**asdict(g), "flat": g.flat} for g in growths],
        "samples": [asdict(sample) for sample in state.samples],
    }


def main() -> int:
    """Soak, report, and say by the exit code whether all stayed flat and right."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--max-s", type=float, default=86400, help="end after so many seconds")
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", default="soak", help="prefix of the .json and .png written")
    options = parser.parse_args()
    state, done = asyncio.run(soak(options))
    if state.wrong:
        sys.stdout.writelines(f"WRONG {text}\n" for text in state.wrong)
    if not (growths := _write(state, done, options.output)):
        sys.stdout.write(f"{done} runs: too few samples after the warm-up to tell of growth\n")
        return 1 if state.wrong else 130
    _draw(growths, state.samples, options.output)
    sys.stdout.write(_table(growths, state, done))
    return 1 if state.wrong or not all(g.flat for g in growths) else 0


if __name__ == "__main__":
    sys.exit(main())
