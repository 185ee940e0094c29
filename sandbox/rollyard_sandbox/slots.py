"""The worker's side of a slot: its socket, its control group, and one run at a time."""

import asyncio
import contextlib
import os
import signal
import socket
import struct

import msgspec

from rollyard_sandbox.cgroups import Leaf
from rollyard_sandbox.reports import Evidence, SlotReport

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("iii")
_MAX_REPORT_BYTES = 512 * 1024 * 1024
_CANCEL = b'{"cancel":true}'
_READY_S = 20.0
_report_decoder = msgspec.json.Decoder(SlotReport)


class SlotLost(Exception):
    """The slot ended without a report. ``evidence`` may explain it."""

    def __init__(self, message: str, evidence: Evidence) -> None:
        super().__init__(message)
        self.evidence = evidence


class Slot:
    """One live slot of a template."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, template: str,
        number: int, disk_bytes: int, pid: int, leaf: Leaf | None,
    ) -> None:  # fmt: skip
        self.template = template
        self.number = number
        self.disk_bytes = disk_bytes
        self.pid = pid
        self.runs = 0
        self.usable = True
        self._reader = reader
        self._writer = writer
        self._leaf = leaf

    @classmethod
    async def adopt(
        cls, ours: socket.socket, *, template: str, number: int, disk_bytes: int, leaf: Leaf | None
    ) -> "Slot":
        """Wait until the cloned slot reports, and put it into its control group.

        Raises:
            SlotLost: it failed to start, or not in time.
            OSError: its control group refuses it.
        """
        try:
            body, pid = await asyncio.wait_for(_first_frame(ours), _READY_S)
        except (TimeoutError, OSError, EOFError) as error:
            raise SlotLost(f"slot did not start: {error!r}", Evidence()) from error
        report = msgspec.json.decode(body)
        if "fault" in report:
            raise SlotLost(f"slot did not start:\n{report['fault']}", Evidence())
        if leaf is not None:
            leaf.add(pid)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        return cls(reader, writer, template=template, number=number, disk_bytes=disk_bytes,
                   pid=pid, leaf=leaf)  # fmt: skip

    async def run(
        self, payload: bytes, *, memory_bytes: int, pids: int
    ) -> tuple[SlotReport, Evidence]:
        """Run one request (its JSON as it came) and return what happened.

        Raises:
            SlotLost: no report came; the slot is no longer usable.
        """
        self.runs += 1
        kills_before = 0
        try:
            if self._leaf is not None:
                self._leaf.limit(memory_bytes, pids + 1)  # PID 1 is in there too
                kills_before = self._leaf.oom_kills()
            self._writer.write(_LENGTH.pack(len(payload)) + payload)
            await self._writer.drain()
            report = _report_decoder.decode(await self._receive())
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.usable = False
            evidence = self._evidence(kills_before)
            raise SlotLost(f"slot gave no report: {error!r}", evidence) from error
        if report.fault is not None:
            self.usable = False
            raise SlotLost(f"fault in the slot:\n{report.fault}", self._evidence(kills_before))
        self.usable = report.dirty is None
        return report, self._evidence(kills_before)

    async def _receive(self) -> bytes:
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > _MAX_REPORT_BYTES:
            raise EOFError(f"report of {length} bytes")
        return await self._reader.readexactly(length)

    def _evidence(self, kills_before: int) -> Evidence:
        if self._leaf is None:
            return Evidence()
        with contextlib.suppress(OSError):
            return Evidence(self._leaf.oom_kills() - kills_before, self._leaf.peak_bytes())
        return Evidence()

    def cancel(self) -> None:
        """Ask PID 1 to end the running program; its report then says ``cancelled``."""
        self._writer.write(_LENGTH.pack(len(_CANCEL)) + _CANCEL)

    async def destroy(self) -> None:
        """Hang up: PID 1 leaves and the kernel kills whatever is in the slot."""
        self.usable = False
        self._writer.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
        if self._leaf is not None:
            await asyncio.to_thread(self._leaf.remove)


async def _first_frame(sock: socket.socket) -> tuple[bytes, int]:
    """Read the slot's first frame and, from the kernel, the host's pid of its sender."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
    data, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
    if not data:
        raise EOFError("it hung up")
    pid = 0
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = _CREDENTIALS.unpack(content)[0]
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    return data[_LENGTH.size :], pid
