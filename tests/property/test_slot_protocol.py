"""The frames between a worker and a slot's PID 1, with anything in them, on a real slot.

PID 1 may end at nonsense, and the pool then makes another; it may never hang, nor leave a
process. The worker takes nonsense from PID 1 for a lost slot, and never for its own end.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from process_tree import until

from rollyard import RunResult
from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox import reports
from rollyard_sandbox.execution import Execution, _job  # pyright: ignore[reportPrivateUsage]
from rollyard_sandbox.guest.protocol import COMPILE, FAULT, MAX_MESSAGE_BYTES, ORDER, REPORT, STOP
from rollyard_sandbox.machine import Machine, open_machine
from rollyard_sandbox.settings import WorkerSettings
from rollyard_sandbox.slots import Slot, SlotLost

DISK = 8 << 20
LOOK_S, ANSWER_S = 0.15, 8.0
LIMITS = LimitsSpec(timeout_s=20.0, cpu_s=None, memory_bytes=128 << 20, disk_bytes=DISK, pids=16,
                    output_bytes=4096)  # fmt: skip
PROGRAMS = (
    "print('x')",
    "import time; time.sleep(60)",
    "import os, time\nos.fork() or os.setsid()\nos.fork()\ntime.sleep(60)",
    "raise SystemExit(3)",
    "import os; os.mkdir('d'); open('d/f', 'w').write('x')",
)
relaxed = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

# What a descriptor of an order may be. The worker sends: job, three pipe ends, perhaps a file.
KINDS = ("job", "garbage", "empty", "null", "ended pipe", "open pipe", "unread pipe", "full pipe",
         "broken pipe", "directory", "socket", "event")  # fmt: skip


def _spec(code: str) -> RunSpec:
    return RunSpec(
        run_id="fuzz", code=code, stdin=None, files={}, fetch_files=["*"], limits=LIMITS,
        template="bare", on_output_limit="truncate", job="fuzz",
    )  # fmt: skip


def _memory_file(content: bytes) -> int:
    file = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    os.write(file, content)
    return file


def _pipe(kind: str) -> tuple[int, list[int]]:
    """One end of a pipe, and what must be closed when the example is over."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    if kind == "full pipe":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(65536))
        os.set_blocking(writer, True)
    if kind in ("ended pipe", "broken pipe"):
        given, gone = (reader, writer) if kind == "ended pipe" else (writer, reader)
        os.close(gone)
        return given, [given]
    return (reader if kind == "open pipe" else writer), [reader, writer]


def _descriptor(kind: str, code: str) -> tuple[int, list[int]]:
    if "pipe" in kind:
        return _pipe(kind)
    if kind == "socket":
        ours, theirs = socket.socketpair()
        return theirs.fileno(), [ours.detach(), theirs.detach()]
    made = {
        "job": lambda: _memory_file(_job(_spec(code))),
        "garbage": lambda: _memory_file(b'{"code": 1, "files": [], \xff'),
        "empty": lambda: _memory_file(b""),
        "null": lambda: os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC),
        "directory": lambda: os.open("/proc", os.O_RDONLY | os.O_CLOEXEC),
        "event": lambda: os.eventfd(0, os.EFD_CLOEXEC),
    }[kind]()
    return made, [made]


@dataclass(frozen=True)
class Order:
    """One message to PID 1, with its descriptors, and STOPs beside it."""

    message: bytes
    kinds: list[str]
    code: str
    stop_before: bool = False
    stop_after: bool = False


def _pack(disk_bytes: int, pids: int, flags: int, between: int = 0) -> bytes:
    """An order; what stands between disk_bytes and pids has one value."""
    fields = len(ORDER.unpack(bytes(ORDER.size)))
    return ORDER.pack(disk_bytes, *[between] * (fields - 3), pids, flags)


_sizes = st.one_of(st.sampled_from([0, 1, 16, DISK]), st.integers(0, (1 << 64) - 1))
_pids_limits = st.one_of(st.just(16), st.integers(0, (1 << 32) - 1))
_well_formed = st.builds(_pack, _sizes, _pids_limits, st.integers(0, 255), _sizes)
_messages = st.one_of(
    _well_formed,
    _well_formed,
    st.binary(max_size=40),
    st.binary(min_size=ORDER.size, max_size=ORDER.size),
    st.integers(1000, 2 * MAX_MESSAGE_BYTES).map(bytes),
).filter(lambda message: message != STOP)  # which is no order: there is no answer to it
_usual = st.just(["job", "null", "unread pipe", "unread pipe", "empty"])
_descriptors = st.one_of(
    _usual,
    _usual.flatmap(lambda usual: st.permutations(usual)),
    st.lists(st.sampled_from(KINDS), max_size=8),
    st.lists(st.sampled_from(KINDS), max_size=4).map(lambda kinds: ["job", *kinds]),
)
_orders = st.builds(
    Order, _messages, _descriptors, st.sampled_from(PROGRAMS), st.booleans(), st.booleans()
)


class Bench:
    """A machine whose loop runs when a test wants it to."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._stack = contextlib.AsyncExitStack()
        self.faults: list[dict[str, Any]] = []
        self.machine: Machine

    def run[T](self, work: Awaitable[T]) -> T:
        async def whole() -> T:
            return await work

        done = self._runner.run(whole())
        assert self.faults == []
        return done

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.faults.append(context))
        chosen = WorkerSettings(slots=2, templates="bare")
        opening = open_machine(chosen, say=lambda _: None)
        self.machine = await self._stack.enter_async_context(opening)

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        made = Bench(runner)
        made.run(made.open())
        yield made
        made.run(made.close())


# Anything to PID 1 ----------------------------------------------------------------------------


@given(orders=st.lists(_orders, min_size=1, max_size=3))
@example(orders=[Order(b"", [], "")])
@example(orders=[Order(_pack(DISK, 16, 7), [], "")])
@example(orders=[Order(_pack(DISK, 16, 0), ["job"], "print(1)")])
@example(orders=[Order(_pack(DISK, 16, 4), [*["job", "null"], *["full pipe"] * 3], PROGRAMS[0])])
@settings(relaxed, max_examples=250)
def test_no_order_hangs_a_slot_or_leaves_a_process(bench: Bench, orders: list[Order]) -> None:
    bench.run(_give(bench.machine, orders))


async def _give(machine: Machine, orders: list[Order]) -> None:
    slot = await machine.pool.acquire("bare", DISK)
    pid = slot.pid
    leaves = _groups(pid)
    try:
        slot.begin(LIMITS.memory_bytes, LIMITS.pids)
        for order in orders:
            if slot.usable:
                await _order(slot, order)
        ended = not slot.usable
    except BaseException:
        slot.usable = False
        raise
    finally:
        await machine.pool.release(slot)
    if ended:
        assert until(lambda: not any(_pids(leaf) for leaf in leaves)), "processes are left"
    report = await _plain_run(machine)
    assert (report.exit_code, report.stdout, report.files) == (0, "well\n", {})


async def _order(slot: Slot, order: Order) -> None:
    made = [_descriptor(kind, order.code) for kind in order.kinds]
    try:
        if order.stop_before:
            slot.stop()
        ending = slot.order(order.message, [descriptor for descriptor, _ in made])
        if order.stop_after:
            slot.stop()
        report = await _answer(slot, ending)
    finally:
        for _, kept in made:
            for descriptor in kept:
                os.close(descriptor)
    if report is None:
        assert not slot.usable
        return
    assert slot.pids() == []
    _, _, clean, status, *_ = REPORT.unpack(report)
    compiled = order.message[-1] & COMPILE and status == 0  # its box is kept for the next order
    if not clean or compiled:
        slot.usable = False


async def _answer(slot: Slot, ending: "asyncio.Future[bytes]") -> bytes | None:
    """The report; None: PID 1 has ended. It may wait for a program until it is told to stop."""
    try:
        await asyncio.wait([ending], timeout=LOOK_S)
        if not ending.done():
            slot.stop()
        async with asyncio.timeout(ANSWER_S):
            return await ending
    except SlotLost:
        return None


async def _plain_run(machine: Machine) -> reports.SlotReport:
    slot = await machine.pool.acquire("bare", DISK)
    try:
        spec = _spec("print('well')")
        report, _ = await Execution(slot, spec).run()
        return report
    finally:
        await machine.pool.release(slot)


def _groups(pid: int) -> list[Path]:
    """Control groups of a slot, as directories of this machine."""
    found: list[Path] = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        found += [
            place
            for place in (Path("/sys/fs/cgroup", names + path), Path("/sys/fs/cgroup" + path))
            if "/slot-" in path and place.is_dir()
        ]
    return found


def _pids(group: Path) -> str:
    with contextlib.suppress(OSError):
        return (group / "cgroup.procs").read_text()
    return ""


# Anything from PID 1 --------------------------------------------------------------------------

_reports = st.builds(
    REPORT.pack, st.sampled_from([0, 1, 2, 255]), st.integers(0, 255), st.integers(0, 255),
    st.one_of(st.integers(-(1 << 31), (1 << 31) - 1), st.sampled_from([0, 256, 9, 0x137F])),
    *[st.integers(0, (1 << 64) - 1)] * 3,
)  # fmt: skip
_said = st.lists(
    st.one_of(
        _reports,
        st.binary(max_size=200),
        st.binary(max_size=100).map(lambda text: FAULT + text),
        st.integers(0, 2 * MAX_MESSAGE_BYTES).map(bytes),
    ),
    max_size=3,
)
_collected = st.one_of(
    st.just(b""), st.binary(max_size=60),
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2)
    .map(lambda found: json.dumps(found).encode()),
)  # fmt: skip


@given(
    unasked=st.just([]) | _said,
    answers=_said,
    written=st.binary(max_size=300),
    collected=_collected,
)
@settings(relaxed, max_examples=400)
def test_no_report_is_more_than_a_result_or_a_lost_slot(
    bench: Bench, unasked: list[bytes], answers: list[bytes], written: bytes, collected: bytes
) -> None:
    bench.run(_hear(unasked, answers, written, collected))


async def _hear(
    unasked: list[bytes], answers: list[bytes], written: bytes, collected: bytes
) -> None:
    async with _imitated() as (slot, peer):
        for message in unasked:
            peer.send(message)
        if unasked:
            # Heard before the order; a pool hands out no slot that was lost while it was idle.
            assert await _soon(lambda: not slot.usable)
            return
        playing = asyncio.create_task(_play(peer, answers, written, collected))
        await asyncio.sleep(0)
        spec = _spec("pass")
        try:
            async with asyncio.timeout(ANSWER_S):
                execution = Execution(slot, spec)
                report, evidence = await execution.run()
        except SlotLost as lost:
            assert str(lost)
        else:
            limits = msgspec.structs.asdict(LIMITS)
            outcome, message = reports.judge(report, evidence, limits)
            record = reports.ResultRecord(
                run_id="fuzz", outcome=outcome, exit_code=report.exit_code, signal=report.signal,
                stdout=report.stdout, stderr=report.stderr, files=report.files, message=message,
                wall_ms=report.wall_ms, cpu_ms=report.cpu_ms,
            )  # fmt: skip
            RunResult.model_validate_json(reports.encode(record))
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


@contextlib.asynccontextmanager
async def _imitated() -> AsyncGenerator[tuple[Slot, socket.socket]]:
    """A slot whose PID 1 is ours to play."""
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    peer.setblocking(False)
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    slot = Slot(
        ours, template="bare", number=1, disk_bytes=DISK, pid=process.pid,
        pidfd=os.pidfd_open(process.pid), leaf=None, owner=os.getuid(),
    )  # fmt: skip
    try:
        yield slot, peer
    finally:
        await slot.destroy()
        await process.wait()
        peer.close()


async def _soon(condition: Callable[[], bool]) -> bool:
    """Let the loop turn until the condition holds; False when it does not."""
    for _ in range(1000):
        if condition():
            return True
        await asyncio.sleep(0)
    return False


async def _play(
    peer: socket.socket, answers: list[bytes], written: bytes, collected: bytes
) -> None:
    """Take the order as PID 1 would, write as the program would, say anything, and hang up."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(peer.fileno(), ready.set)
    await ready.wait()
    loop.remove_reader(peer.fileno())
    _, descriptors, _, _ = socket.recv_fds(peer, MAX_MESSAGE_BYTES, 5)
    for stream in descriptors[2:4]:
        os.write(stream, written)
    if len(descriptors) == 5:
        os.write(descriptors[4], collected)
    for descriptor in descriptors:
        os.close(descriptor)
    for message in answers:
        peer.send(message)
    peer.shutdown(socket.SHUT_RDWR)
