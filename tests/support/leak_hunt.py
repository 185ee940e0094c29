"""Poisoners and victims in turn, in the same slot and template, as fast as slots serve them.

No queue and no HTTP: two slots of a real machine, one run after another. Also a command, behind
``scripts/soak --leaks N``.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from poisons import LOOK_ROUND_QUICKLY, POISONS
from programs import PRELUDE

from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.machine import Machine, open_machine
from rollyard_sandbox.reports import SlotReport
from rollyard_sandbox.settings import WorkerSettings
from rollyard_sandbox.slots import Slot, SlotLost

LANES = 2
DISK_BYTES = 16 << 20
TEMPLATES = ("bare", "science")
_HEADS = {"bare": "", "science": "import numpy\n"}
_POISON_S, _VICTIM_S = 0.1, 60.0
_SHOWN = 300
# Five to ten times slower than the others, by what they do; they get a tenth of the turns.
_SLOW = ("sockets and shared memory", "numpy settings", "a memory kill",
         "a time-out with children")  # fmt: skip


@dataclass
class Hunt:
    """One machine, and what a victim sees in a slot that nobody has used before."""

    machine: Machine
    templates: tuple[str, ...] = TEMPLATES
    unspoilt: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    pairs: Counter[str] = field(default_factory=Counter[str])
    slots_lost: int = 0

    async def prepare(self) -> None:
        """Take the victim's view in new slots: one for each template and number of a slot."""
        for template in self.templates:
            async with contextlib.AsyncExitStack() as held:
                for _ in range(LANES):
                    slot = await self.machine.pool.acquire(template, DISK_BYTES, new=True)
                    held.push_async_callback(self.machine.pool.release, slot)
                    self.unspoilt[template, slot.number] = await _look(slot)

    async def pair(self, template: str, name: str, poison: str) -> str:
        """Run the poison and then the victim; what the victim saw otherwise than it should.

        In the same slot; where the poison cost the slot its life, in the next of the template.
        """
        pool = self.machine.pool
        slot = await pool.acquire(template, DISK_BYTES)
        try:
            with contextlib.suppress(SlotLost):  # the run is ours to answer for; not the victim's
                await _run(slot, _HEADS[template] + poison, _POISON_S)
            if not slot.usable:
                self.slots_lost += 1
                await pool.release(slot)
                slot = await pool.acquire(template, DISK_BYTES)
            seen = await _look(slot)
        finally:
            await pool.release(slot)
        self.pairs[name] += 1
        return _difference(self.unspoilt[template, slot.number], seen)

    async def listed(self, template: str, times: int) -> list[str]:
        """Every poison so many times, on all lanes; what leaked, each with the poison's name."""
        turns = {name: max(1, times // 10) if name in _SLOW else times for name in POISONS}
        waiting = iter([name for turn in range(times) for name in POISONS if turn < turns[name]])
        leaks: list[str] = []

        async def lane() -> None:
            for name in waiting:
                if leak := await self.pair(template, name, POISONS[name]):
                    leaks.append(f"{template}, {name}: {leak}")

        async with asyncio.TaskGroup() as lanes:
            for _ in range(LANES):
                lanes.create_task(lane())
        return leaks


async def _run(slot: Slot, code: str, timeout_s: float) -> SlotReport:
    limits = LimitsSpec(timeout_s=timeout_s, cpu_s=None, memory_bytes=128 << 20,
                        disk_bytes=DISK_BYTES, pids=24, output_bytes=65536)  # fmt: skip
    spec = RunSpec(
        run_id="leak", code=PRELUDE + code, stdin=None, files={}, fetch_files=[], limits=limits,
        template=slot.template, on_output_limit="truncate", job="leak",
    )  # fmt: skip
    report, _ = await Execution(slot, spec).run()
    return report


async def _look(slot: Slot) -> str:
    report = await _run(slot, _HEADS[slot.template] + LOOK_ROUND_QUICKLY, _VICTIM_S)
    return f"{report.exit_code} {report.signal} {report.stderr}\n{report.stdout}"


def _difference(wanted: str, seen: str) -> str:
    if wanted == seen:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(wanted, seen, strict=False)) if a != b), 0)
    start = max(0, at - 80)
    return f"…{seen[start : start + _SHOWN]}… instead of …{wanted[start : start + _SHOWN]}…"


# Mutations ------------------------------------------------------------------------------------

_LEAVES = ("pass", "os._exit(0)", "os.kill(os.getpid(), 9)", "os.abort()", "1 / 0",
           "os.fork()\nwhile True: time.sleep(1)", "os.kill(-1, 19)")  # fmt: skip
_small = st.one_of(
    st.integers(0, 70), st.sampled_from([0, 1, 2, 255, 4096, 1 << 30, (1 << 64) - 1])
)
_names = st.one_of(
    st.sampled_from(["json.py", "main.py", "x" * 255, "a/b/c", ".x", "sitecustomize.py"]),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1,
            max_size=20),
)  # fmt: skip
_places = st.sampled_from(["/box/work", "/tmp", "/dev/shm", "/box", "/", "/proc/self", "/dev"])
# What changes state of a process, a user or a namespace, with any arguments: prctl, personality,
# priorities, limits, schedulers, alarms, masks, ioctl and fcntl of the three descriptors.
_CALLS = (157, 135, 141, 251, 160, 302, 144, 142, 203, 314, 37, 38, 222, 282, 283, 284, 289,
          16, 72, 73, 95, 105, 106, 109, 112, 113, 114, 116, 117, 119, 126, 127, 130, 131, 149,
          151, 158, 218, 240, 248, 250, 319, 324, 334, 444, 450)  # fmt: skip


def _write(place: str, name: str, mode: int) -> str:
    return f"""p = os.path.join({place!r}, {name!r})
os.makedirs(os.path.dirname(p), exist_ok=True)
open(p, "w").write("left"); os.chmod(p, {mode & 0o7777})"""


def _special(place: str, name: str, kind: int) -> str:
    made = ("os.mkfifo(p)", "os.symlink('/box', p)", "os.mkdir(p, 0)", "os.mknod(p)",
            "socket.socket(socket.AF_UNIX).bind(p)", "os.link('/box/work/main.py', p)")  # fmt: skip
    return f"p = os.path.join({place!r}, {name!r})\n{made[kind % len(made)]}"


def _call(number: int, arguments: list[int]) -> str:
    whole = ", ".join(f"ctypes.c_ulong({one})" for one in arguments)
    return f"libc.syscall({number}, {whole})"


_parts = st.one_of(
    st.sampled_from(list(POISONS.values())),
    st.builds(_write, _places, _names, st.integers(0, 0o7777)),
    st.builds(_special, _places, _names, _small),
    st.builds(_call, st.sampled_from(_CALLS), st.lists(_small, min_size=1, max_size=5)),
    st.builds("os.environ[{!r}] = 'left'".format, _names),
    st.builds("sys.modules.pop({!r}, None)".format, st.sampled_from(["os", "json", "builtins"])),
)


def _joined(parts: list[str], leave: str, forked: bool) -> str:
    return f"""
def part(text):
    try:
        exec(compile(text, "part", "exec"), globals())
    except BaseException:
        pass
if {forked} and os.fork() == 0:
    os.setsid()
for text in {parts!r}:
    part(text)
{leave}
"""


mutated = st.builds(
    _joined, st.lists(_parts, min_size=1, max_size=5), st.sampled_from(_LEAVES), st.booleans()
)
"""Poisons cut up, mixed with calls that have any arguments, and ended in some way."""


class Hunter:
    """A hunt whose loop runs when the caller wants it to, as hypothesis needs."""

    def __init__(self, templates: tuple[str, ...] = TEMPLATES) -> None:
        self._templates = templates
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self.hunt: Hunt

    def __enter__(self) -> "Hunter":
        async def opened() -> Machine:
            chosen = WorkerSettings(slots=LANES, templates=",".join(self._templates))
            return await self._stack.enter_async_context(open_machine(chosen, say=lambda _: None))

        self._runner.__enter__()
        self.hunt = Hunt(self._runner.run(opened()), self._templates)
        self._runner.run(self.hunt.prepare())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def run[T](self, work: Awaitable[T]) -> T:
        async def whole() -> T:
            return await work

        return self._runner.run(whole())

    def mutations(self, examples: int) -> None:
        """Try so many mutated poisons; AssertionError with the smallest that leaks."""

        @given(st.sampled_from(self._templates), mutated)
        @settings(
            deadline=None, max_examples=examples, database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )  # fmt: skip
        def one(template: str, poison: str) -> None:
            leak = self.run(self.hunt.pair(template, "mutated", poison))
            assert leak == "", f"{template}: {leak}"

        one()


def _rounds(times: int) -> Iterable[tuple[int, str]]:
    """Ten rounds at least, so that there is progress to tell."""
    step = max(1, times // 10)
    for done in range(0, times, step):
        for template in TEMPLATES:
            yield min(step, times - done), template


def _hunt(hunter: Hunter, times: int) -> Iterator[str]:
    started = time.monotonic()
    for some, template in _rounds(times):
        yield from hunter.run(hunter.hunt.listed(template, some))
        done = hunter.hunt.pairs.total()
        rate = done / (time.monotonic() - started)
        sys.stderr.write(f"\r{done} pairs, {rate:.0f}/s, {hunter.hunt.slots_lost} slots replaced ")
        sys.stderr.flush()
    sys.stderr.write("\n")


def main() -> int:
    """Exit code 1: a victim saw something of a poisoner."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description="Run every poison and a victim after it in the same slot, N times in each "
        "template, and N mutated poisons.",
    )
    parser.add_argument("--leaks", type=int, required=True, metavar="N")
    options = parser.parse_args()
    with Hunter() as hunter:
        leaks = list(_hunt(hunter, options.leaks))
        sys.stdout.writelines(f"LEAK {leak}\n" for leak in leaks)
        try:
            hunter.mutations(options.leaks)
        except AssertionError as error:
            leaks.append(str(error))
            sys.stdout.write(f"LEAK {error}\n")
        total = hunter.hunt.pairs.total()
        lost = hunter.hunt.slots_lost
        sys.stdout.write(f"{total} pairs, {len(leaks)} leaks, {lost} slots replaced\n")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
