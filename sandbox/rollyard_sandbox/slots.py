"""The worker's side of a slot: its socket, its control group, and one order at a time."""

import asyncio
import contextlib
import os
import signal
import socket
import struct

from rollyard_sandbox import clock
from rollyard_sandbox.cgroups import Leaf
from rollyard_sandbox.guest.protocol import FAULT, MAX_MESSAGE_BYTES, READY, REPORT, STOP
from rollyard_sandbox.reports import Evidence

_CREDENTIALS = struct.Struct("iii")
_READY_S = 20.0


class SlotLost(Exception):
    """The slot ended without a report. ``evidence`` may explain it."""

    def __init__(self, message: str, evidence: Evidence) -> None:
        super().__init__(message)
        self.evidence = evidence


class Slot:
    """One live slot of a template."""

    def __init__(
        self, sock: socket.socket, *, template: str, number: int, disk_bytes: int, pid: int,
        leaf: Leaf | None,
    ) -> None:  # fmt: skip
        self.template = template
        self.number = number
        self.disk_bytes = disk_bytes
        self.pid = pid
        self.usable = True
        self._sock = sock
        self._leaf = leaf
        self._kills_before = 0
        self._ending: asyncio.Future[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._hear)

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
            message, pid = await asyncio.wait_for(_first_message(ours), _READY_S)
        except (TimeoutError, OSError) as error:
            raise SlotLost(f"slot did not start: {error!r}", Evidence()) from error
        if message != READY:
            said = message.removeprefix(FAULT).decode("utf-8", "replace") or "it hung up"
            raise SlotLost(f"slot did not start: {said}", Evidence())
        if leaf is not None:
            leaf.add(pid)
        return cls(ours, template=template, number=number, disk_bytes=disk_bytes, pid=pid,
                   leaf=leaf)  # fmt: skip

    def begin(self, memory_bytes: int, pids: int) -> None:
        """Set the limits of the next run.

        Raises:
            SlotLost: the control group refuses them.
        """
        if self._leaf is not None:
            try:
                self._leaf.limit(memory_bytes, pids + 1)  # PID 1 is in there too
                self._kills_before = self._leaf.oom_kills()
            except OSError as error:
                self.usable = False
                raise SlotLost(f"control group: {error}", Evidence()) from error

    def order(self, order: bytes, descriptors: list[int]) -> asyncio.Future[bytes]:
        """Start a program; the future is its report, or SlotLost."""
        self._ending = self._loop.create_future()
        try:
            socket.send_fds(self._sock, [order], descriptors)
        except OSError as error:
            self._lose(f"slot takes no order: {error}")
        return self._ending

    def stop(self) -> None:
        """Ask PID 1 to end the running program; its report then says ``stopped``."""
        with contextlib.suppress(OSError):
            self._sock.send(STOP)

    def pids(self) -> list[int]:
        """Host pids of the run's processes, without PID 1."""
        pids = self._leaf.pids() if self._leaf is not None else clock.descendants(self.pid)
        return [pid for pid in pids if pid != self.pid]

    def evidence(self) -> Evidence:
        """What the control group says since begin()."""
        if self._leaf is not None:
            with contextlib.suppress(OSError):
                kills = self._leaf.oom_kills() - self._kills_before
                return Evidence(kills, self._leaf.peak_bytes())
        return Evidence()

    async def destroy(self) -> None:
        """Hang up: PID 1 leaves and the kernel kills whatever is in the slot."""
        self.usable = False
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
        if self._leaf is not None:
            await asyncio.to_thread(self._leaf.remove)

    def _hear(self) -> None:
        try:
            message = self._sock.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"slot gave no report: {error}")
            return
        if len(message) == REPORT.size and self._ending is not None and not self._ending.done():
            self._ending.set_result(message)
        else:
            said = message.removeprefix(FAULT).decode("utf-8", "replace")
            self._lose(f"fault in the slot: {said}" if said else "slot ended without a report")

    def _lose(self, message: str) -> None:
        self.usable = False
        self._loop.remove_reader(self._sock.fileno())
        if self._ending is not None and not self._ending.done():
            self._ending.set_exception(SlotLost(message, self.evidence()))


async def _first_message(sock: socket.socket) -> tuple[bytes, int]:
    """Read the slot's first message and, from the kernel, the host's pid of its sender."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
    space = socket.CMSG_SPACE(_CREDENTIALS.size)
    message, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE_BYTES, space)
    pid = 0
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = _CREDENTIALS.unpack(content)[0]
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    return message, pid
