"""The worker's side of a slot: its socket, its control group, and one order at a time."""

import asyncio
import contextlib
import os
import signal
import socket
import struct

from rollyard_sandbox import clock
from rollyard_sandbox.cgroups import Counts, Leaf
from rollyard_sandbox.guest.protocol import (
    ADOPTED,
    FAULT,
    HELLO,
    MAX_MESSAGE_BYTES,
    READY,
    REPORT,
    STOP,
)
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
        pidfd: int, leaf: Leaf | None, owner: int,
    ) -> None:  # fmt: skip
        self.template = template
        self.number = number
        self.disk_bytes = disk_bytes
        self.pid = pid
        self.owner = owner
        """Host id of the programs' user."""
        self.usable = True
        self._sock = sock
        self._leaf = leaf
        # The number may be another process's by the time we kill; the descriptor never is.
        self._pidfd = pidfd
        self._before = Counts()
        self._ending: asyncio.Future[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._hear)

    @classmethod
    async def adopt(
        cls, ours: socket.socket, *, template: str, number: int, disk_bytes: int,
        leaf: Leaf | None, owner: int,
    ) -> "Slot":  # fmt: skip
        """Wait until the cloned slot reports, and put it into its control group.

        Raises:
            SlotLost: it failed to start, or not in time.
            OSError: its control group refuses it.
        """
        pidfd = -1
        try:
            async with asyncio.timeout(_READY_S):
                pid = await _expect(ours, HELLO)
                pidfd = os.pidfd_open(pid)
                if leaf is not None:
                    leaf.add(pid)
                ours.send(ADOPTED)
                if await _expect(ours, READY) != pid:
                    raise SlotLost("slot did not start: two processes answer", Evidence())
        except BaseException as error:
            if pidfd >= 0:
                os.close(pidfd)
            if isinstance(error, TimeoutError | OSError):
                raise SlotLost(f"slot did not start: {error!r}", Evidence()) from error
            raise
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return cls(ours, template=template, number=number, disk_bytes=disk_bytes, pid=pid,
                   pidfd=pidfd, leaf=leaf, owner=owner)  # fmt: skip

    @property
    def has_group(self) -> bool:
        """False where the machine has no control groups, and limits are watched from outside."""
        return self._leaf is not None

    def begin(self, memory_bytes: int, pids: int) -> None:
        """Set the limits of the next run.

        Raises:
            SlotLost: the control group refuses them.
        """
        if self._leaf is not None:
            try:
                self._leaf.limit(memory_bytes, pids + 1)  # PID 1 is in there too
                self._before = self._leaf.counts()
            except OSError as error:
                self.usable = False
                raise SlotLost(f"control group: {error}", Evidence()) from error

    def order(self, order: bytes, descriptors: list[int]) -> asyncio.Future[bytes]:
        """Start a program; the future is its report, or SlotLost."""
        self._ending = self._loop.create_future()
        if not self.usable:  # heard of between two orders; nobody will hear of it again
            self._lose("slot was lost before its order")
            return self._ending
        try:
            socket.send_fds(self._sock, [order], descriptors)
        except OSError as error:
            self._lose(f"slot takes no order: {error}")
        return self._ending

    def stop(self) -> None:
        """Ask PID 1 to end the running program; its report then says ``stopped``."""
        with contextlib.suppress(OSError):
            self._sock.send(STOP)

    def give_up(self) -> None:
        """Wait no longer for a report: PID 1 itself hangs."""
        self._lose("slot does not end its program")

    def cpu_s(self) -> float | None:
        """CPU of everything in the slot since begin(), PID 1 included; None without a group."""
        if self._leaf is None:
            return None
        return max(0.0, self._leaf.cpu_s() - self._before.cpu_s)

    def computes(self) -> bool:
        """False when the program is there and all its threads sleep."""
        pids = self.pids()
        return not pids or clock.any_runnable(pids)

    def pids(self) -> list[int]:
        """Host pids of the run's processes, without PID 1."""
        pids = self._leaf.pids() if self._leaf is not None else clock.descendants(self.pid)
        return [pid for pid in pids if pid != self.pid]

    def evidence(self) -> Evidence:
        """What the control group says since begin()."""
        if self._leaf is not None:
            with contextlib.suppress(OSError):
                now = self._leaf.counts()
                kills = now.oom_kills - self._before.oom_kills
                # A kill without the run's own limit being hit is the machine's shortage.
                own = kills if now.limit_hits > self._before.limit_hits else 0
                return Evidence(own, kills - own, self._leaf.peak_bytes())
        return Evidence()

    async def destroy(self) -> None:
        """Hang up: PID 1 leaves and the kernel kills whatever is in the slot."""
        self.usable = False
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
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


async def _expect(sock: socket.socket, wanted: bytes) -> int:
    """Wait for a message and return, from the kernel, the host's pid of its sender.

    Raises:
        SlotLost: it says something else, or hangs up.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
    space = socket.CMSG_SPACE(_CREDENTIALS.size)
    message, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE_BYTES, space)
    if message != wanted:
        said = message.removeprefix(FAULT).decode("utf-8", "replace") or "it hung up"
        raise SlotLost(f"slot did not start: {said}", Evidence())
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return _CREDENTIALS.unpack(content)[0]
    raise SlotLost("slot did not start: no credentials", Evidence())
