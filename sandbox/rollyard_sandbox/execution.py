"""One program in one slot: its pipes, its clock, and what is known of it at the end.

Everything that the program gives and takes passes here, outside the jail: PID 1 is forked into
the next program and must not have seen it.
"""

import asyncio
import contextlib
import marshal
import os
from dataclasses import dataclass
from typing import Annotated

import msgspec

from rollyard_queue.records import RunSpec
from rollyard_sandbox import clock
from rollyard_sandbox.clock import Clock
from rollyard_sandbox.guest.protocol import (
    COMPILE,
    COMPILED,
    FETCH,
    MAX_FETCHED_BYTES,
    NOT_BEGUN,
    ORDER,
    REFUSED,
    REPORT,
)
from rollyard_sandbox.output import KeptOutput
from rollyard_sandbox.reports import Evidence, SlotReport
from rollyard_sandbox.slots import Slot, SlotLost

_READ_BYTES = 65536
# Most programs have ended by then and are read once; until then a pipe holds 64 KiB.
_FIRST_READ_S = 0.002
_MEMORY_LOOK_S = 0.05
_STOP_PATIENCE_S = 20.0  # PID 1 needs milliseconds to end a program; then it hangs itself


class _Encoded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base64: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9+/]*={0,2}\Z")]

    def __post_init__(self) -> None:
        if len(self.base64) % 4:
            raise ValueError("base64 without its padding")


class _Collected(msgspec.Struct, frozen=True):
    files: dict[str, str | _Encoded] = {}
    left_out: list[str] = []


_collected_decoder = msgspec.json.Decoder(_Collected)


@dataclass(frozen=True)
class _Ended:
    """A decoded report."""

    begun: int
    stopped: bool
    clean: bool
    status: int
    wall_ms: float
    waited_for_ms: float
    own_ms: float


class Execution:
    """Runs one request; stop() may be called at any time from the same loop."""

    def __init__(self, slot: Slot, spec: RunSpec) -> None:
        self._slot = slot
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._reason: str | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._reading: set[int] = set()
        self._streams: dict[int, KeptOutput] = {}
        self._stdin = -1
        self._pending = memoryview(b"")
        self._clock = Clock(1.0, None)

    def stop(self, reason: str) -> None:
        """End the program; the first reason is the one that counts."""
        if self._reason is None:
            self._reason = reason
            self._slot.stop()
            patience = self._loop.call_later(_STOP_PATIENCE_S, self._slot.give_up)
            self._timers.append(patience)

    async def run(self) -> tuple[SlotReport, Evidence]:
        """Run the request's steps and return what happened.

        Raises:
            SlotLost: no report came, or the program could not be started; our fault.
        """
        limits = self._spec.limits
        self._slot.begin(limits.memory_bytes, limits.pids)
        job = os.memfd_create("rollyard-job", os.MFD_CLOEXEC)
        fetched = os.memfd_create("rollyard-files", os.MFD_CLOEXEC) if self._fetches else -1
        try:
            os.write(job, _job(self._spec))
            if self._spec.language == "cpp":
                report = await self._step(job, -1, COMPILE, limits.compile_timeout_s, None)
                if report.exit_code != 0 or report.killed:
                    evidence = self._slot.evidence()
                    return msgspec.structs.replace(report, phase="compile"), evidence
                self._slot.begin(limits.memory_bytes, limits.pids)
            flags = COMPILED if self._spec.language == "cpp" else 0
            report = await self._step(job, fetched, flags, limits.timeout_s, self._spec.stdin)
            return report, self._slot.evidence()
        finally:
            os.close(job)
            if fetched >= 0:
                os.close(fetched)

    @property
    def _fetches(self) -> bool:
        return bool(self._spec.fetch_files)

    async def _step(
        self, job: int, fetched: int, flags: int, timeout_s: float, stdin: str | None
    ) -> SlotReport:
        limits = self._spec.limits
        descriptors = [job, *self._open_pipes(stdin)]
        if fetched >= 0:
            flags |= FETCH
            descriptors.append(fetched)
        try:
            # The compiler has a clock of its own; CPU is the program's.
            self._clock = Clock(timeout_s, None if flags & COMPILE else limits.cpu_s)
            data_bytes = 0 if self._slot.has_group else limits.memory_bytes
            order = ORDER.pack(limits.disk_bytes, data_bytes, limits.pids, flags)
            ending = self._slot.order(order, descriptors)
        finally:
            for given in descriptors[1:4]:
                os.close(given)
        try:
            self._timers = [
                self._loop.call_later(_FIRST_READ_S, self._start_reading),
                self._loop.call_later(self._clock.first_look_s(), self._look),
            ]
            if not self._slot.has_group:
                self._watch_memory()
            self._feed()
            ended = _decode(await ending)
            self._drain()
        finally:
            self._close()
        if not ended.clean or (self._reason and flags & COMPILE):
            self._slot.usable = False
        return self._report(ended, fetched)

    # Pipes ------------------------------------------------------------------------------------

    def _open_pipes(self, stdin: str | None) -> tuple[int, int, int]:
        """Open the three pipes; keep our ends and return the program's."""
        stdin_read, self._stdin = os.pipe2(os.O_CLOEXEC)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        self._pending = memoryview((stdin or "").encode())
        for ours in (self._stdin, out_read, err_read):
            os.set_blocking(ours, False)
            # Owned by the program's user, it can be opened again: /dev/stdin, /proc/self/fd/1.
            os.fchown(ours, self._slot.owner, self._slot.owner)
        bound = self._spec.limits.output_bytes
        self._streams = {out_read: KeptOutput(bound), err_read: KeptOutput(bound)}
        return stdin_read, out_write, err_write

    def _start_reading(self) -> None:
        for stream in self._streams:
            self._reading.add(stream)
            self._loop.add_reader(stream, self._read, stream)

    def _read(self, stream: int) -> None:
        try:
            data = os.read(stream, _READ_BYTES)
        except BlockingIOError:
            return
        kept = self._streams[stream]
        kept.add(data)
        if not data:
            self._reading.discard(stream)
            self._loop.remove_reader(stream)
        elif kept.truncated and self._spec.on_output_limit == "stop":
            self.stop("output_limit")

    def _feed(self) -> None:
        """Write what fits into stdin; come back when there is room again."""
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._stdin, self._pending) :]
        except BlockingIOError:
            self._loop.add_writer(self._stdin, self._feed)
            return
        except OSError:  # nobody reads any more
            pass
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def _drain(self) -> None:
        """Take what was written before the end; all writers are dead by now."""
        for stream, kept in self._streams.items():
            with contextlib.suppress(BlockingIOError):
                while data := os.read(stream, _READ_BYTES):
                    kept.add(data)

    def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for stream in self._reading:
            self._loop.remove_reader(stream)
        self._reading.clear()
        self._close_stdin()
        for stream in self._streams:
            os.close(stream)

    # Clock ------------------------------------------------------------------------------------

    def _look(self) -> None:
        found = self._clock.look(self._slot.pids(), self._slot.cpu_s())
        if isinstance(found, str):
            self.stop(found)
        else:
            self._timers[1] = self._loop.call_later(found, self._look)

    def _cpu_ms(self, ended: _Ended) -> float:
        """CPU of the program and all its children: the group's, less what PID 1 used itself."""
        group_s = self._slot.cpu_s()
        if group_s is None:
            return ended.waited_for_ms
        return round(max(ended.waited_for_ms, group_s * 1e3 - ended.own_ms), 3)

    def _watch_memory(self) -> None:
        """Without a control group: measure all processes together, twenty times a second."""
        if clock.exceeds(self._slot.pids(), self._spec.limits.memory_bytes):
            self.stop("memory")
        else:
            self._timers.append(self._loop.call_later(_MEMORY_LOOK_S, self._watch_memory))
            del self._timers[2:-1]  # those that have fired

    # Report -----------------------------------------------------------------------------------

    def _report(self, ended: _Ended, fetched: int) -> SlotReport:
        stdout, stderr = self._streams.values()
        # A program that had ended by itself was not ended by a reason that came too late.
        killed = self._reason if ended.stopped else None
        passed = stdout.truncated or stderr.truncated
        if passed and killed is None and self._spec.on_output_limit == "stop":
            killed = "output_limit"  # it ended before we looked; the verdict is the same
        never_forked = killed == "timeout" and not self._clock.saw_program
        if ended.begun == NOT_BEGUN and (killed is None or never_forked):
            self._slot.usable = False  # the cause may be in the slot
            text = f"the program could not be started: {stderr.text()}"
            raise SlotLost(text, self._slot.evidence())
        files, left_out = _collected(fetched) if fetched >= 0 else ({}, [])
        return SlotReport(
            exit_code=os.WEXITSTATUS(ended.status) if os.WIFEXITED(ended.status) else None,
            signal=os.WTERMSIG(ended.status) if os.WIFSIGNALED(ended.status) else None,
            killed=killed,
            refused=ended.begun == REFUSED,
            waited_ms=round(self._clock.waited_s * 1e3, 3),
            wall_ms=ended.wall_ms,
            cpu_ms=self._cpu_ms(ended),
            stdout=stdout.text(),
            stderr=stderr.text(),
            stdout_truncated=stdout.truncated,
            stderr_truncated=stderr.truncated,
            files=files,
            left_out=left_out,
        )


def _job(spec: RunSpec) -> bytes:
    """What the program's process reads (guest/programs.py)."""
    return marshal.dumps(
        {
            "code": spec.code,
            "files": spec.files,
            "fetch_files": spec.fetch_files,
            "language": spec.language,
            "isolation": spec.isolation,
            "echo_last": spec.echo_last,
        }
    )


def _decode(message: bytes) -> _Ended:
    begun, stopped, clean, status, wall_us, cpu_us, own_us = REPORT.unpack(message)
    times = (wall_us / 1e3, cpu_us / 1e3, own_us / 1e3)
    return _Ended(begun, bool(stopped), bool(clean), status, *times)


def _collected(descriptor: int) -> tuple[dict[str, str | dict[str, str]], list[str]]:
    """Files and what was left out; nothing where the collection itself failed.

    What the SDK would not read is not passed on: its error would be the caller's.
    """
    data = os.pread(descriptor, 8 * MAX_FETCHED_BYTES, 0)
    try:
        found = _collected_decoder.decode(data) if data else _Collected()
    except msgspec.DecodeError:
        found = _Collected()
    files = {
        name: content if isinstance(content, str) else {"base64": content.base64}
        for name, content in found.files.items()
    }
    return files, found.left_out
