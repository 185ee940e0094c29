"""A slot: a set of namespaces in which one program at a time lives; this is its PID 1.

Protects against: a program that lies about how it ended (the report is made here, from wait
status and our clock), survives its end, or leaves anything behind. PID 1 has another user than
the program, and is under the same system-call filter. It never holds anything of a run but
numbers (see protocol).
"""

import contextlib
import mmap
import os
import resource
import select
import signal
import socket
import time
import traceback
from typing import NoReturn

from . import box, child, filter, kernel, landlock, programs
from .protocol import (
    ADOPTED,
    COMPILE,
    FAULT,
    FETCH,
    HELLO,
    MAX_MESSAGE_BYTES,
    ORDER,
    READY,
    REPORT,
    STOP,
)

_KILL_PATIENCE_S = 10.0
_TIDY_PATIENCE_S = 10
_MAX_DESCRIPTORS = 5
_SHORT_RUN_MS = 50
_RLIMITS = (
    (resource.RLIMIT_MEMLOCK, 64 * 1024),
    (resource.RLIMIT_MSGQUEUE, 0),
    (resource.RLIMIT_NOFILE, 1024),
    (resource.RLIMIT_NICE, 0),
    (resource.RLIMIT_RTPRIO, 0),
    (resource.RLIMIT_SIGPENDING, 256),
)


def main(sock: socket.socket, uid: int, disk_bytes: int) -> NoReturn:
    """Set up the slot's walls and serve runs until the worker hangs up. Never returns."""
    status = 1
    try:
        slot = Slot(sock, uid, disk_bytes)
        slot.serve()
        status = 0
    except child.Become:
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            sock.send((FAULT + traceback.format_exc().encode())[:MAX_MESSAGE_BYTES])
    os._exit(status)  # PID 1: the kernel kills whatever is left of the slot


class Slot:
    def __init__(self, sock: socket.socket, uid: int, disk_bytes: int) -> None:
        self._sock = sock
        self._uid = uid
        self._begun = mmap.mmap(-1, mmap.PAGESIZE)
        self._program = 0
        self._orphans_cpu_s = 0.0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        core_bytes = _core_limit()
        sock.send(HELLO)
        if sock.recv(MAX_MESSAGE_BYTES) != ADOPTED:
            os._exit(0)
        # In its control group by now: seen from inside, the group's own path is the root.
        os.unshare(os.CLONE_NEWCGROUP)
        os.unshare(os.CLONE_NEWNS | os.CLONE_NEWIPC | os.CLONE_NEWNET | os.CLONE_NEWUTS)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        self._last_pid = _open_last_pid(flags)
        kernel.mount("proc", "/proc", "proc", flags, "subset=pid,hidepid=invisible")
        self._box = box.Box(disk_bytes, uid)
        for what, bound in (*_RLIMITS, (resource.RLIMIT_CORE, core_bytes)):
            # The hard limit may already be lower; raising it would need a privilege.
            _, hard = resource.getrlimit(what)
            lowered = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(what, (lowered, lowered))
        kernel.close_capabilities()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        landlock.restrict()
        if filter.supported():
            kernel.install_filter(filter.program())
        sock.send(READY)

    def serve(self) -> None:
        clean = True
        while clean:
            order, descriptors, _, _ = socket.recv_fds(
                self._sock, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS
            )
            if not order:
                return
            if order == STOP:  # it crossed with the end of the run that it meant
                continue
            clean = self._run(order, descriptors)

    def _run(self, order: bytes, descriptors: list[int]) -> bool:
        """Run one program and report; False when the slot cannot serve another."""
        disk_bytes, data_bytes, pids, flags = ORDER.unpack(order)
        self._begun[0] = 0
        started, own = time.monotonic_ns(), time.process_time_ns()
        self._orphans_cpu_s = 0.0
        if self._last_pid >= 0:
            os.pwrite(self._last_pid, b"1", 0)
        self._program = pid = os.fork()
        if pid == 0:
            try:
                job = programs.read_job(descriptors[0])
                limits = child.Limits(disk_bytes, data_bytes, pids)
                child.confine(limits, self._uid, descriptors[1:4])
                # Its descriptor is closed; the object must not close the number once more.
                self._sock.detach()
                programs.start(job, flags, self._begun)
            except child.Become:
                raise
            except BaseException:
                os.write(2, traceback.format_exc().encode())
                os._exit(1)
        for end in descriptors[1:4]:
            os.close(end)
        stopped = self._until_end(pid)
        wall_us = (time.monotonic_ns() - started) // 1000
        status, cpu_s = _kill_and_reap(pid)
        cpu_s += self._orphans_cpu_s
        if flags & COMPILE and status == 0 and not stopped:
            clean = True  # its product is what the next order runs
        else:
            clean = self._tidy(descriptors if flags & FETCH else [])
        for kept in (descriptors[0], *descriptors[4:]):
            os.close(kept)
        own_us = (time.process_time_ns() - own) // 1000
        report = (self._begun[0], stopped, clean, status, wall_us, int(cpu_s * 1e6), own_us)
        self._sock.send(REPORT.pack(*report))
        return clean

    def _until_end(self, pid: int) -> bool:
        """Wait until the first process has ended (False) or the worker says stop (True)."""
        pidfd = os.pidfd_open(pid)
        try:
            self._poll.register(pidfd, select.POLLIN)
            events = self._poll.poll(_SHORT_RUN_MS)
            if not events:  # only a longer run leaves orphans that it might count
                signal.signal(signal.SIGCHLD, self._reap_orphans)
                self._reap_orphans()
                events = self._poll.poll()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if any(ready == pidfd for ready, _ in events):
                return False
            if not self._sock.recv(MAX_MESSAGE_BYTES):
                os._exit(0)  # the worker is gone: PID 1's end takes the whole slot with it
            return True
        finally:
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def _reap_orphans(self, *_: object) -> None:
        """On SIGCHLD: wait for what the program left to us, as any init does.

        The program itself is left for _kill_and_reap, which tells how it ended.
        """
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid == self._program:
                    return
                usage = os.wait4(ended.si_pid, os.WNOHANG)[2]
                self._orphans_cpu_s += usage.ru_utime + usage.ru_stime

    def _tidy(self, fetch: list[int]) -> bool:
        """Make the box as it was; True when the kernel's counts say that it is.

        Names and contents are handled by a process of its own, which ends with them.
        """
        with contextlib.suppress(OSError, box.NotEmptied):
            if not fetch:
                with contextlib.suppress(OSError):
                    self._box.renew()
                    return True
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.alarm(_TIDY_PATIENCE_S)  # PID 1 waits for it, and for nothing else
                    if fetch:
                        programs.collect(fetch[0], fetch[4])
                    box.clear()
                    code = 0
                finally:
                    os._exit(code)
            if os.waitpid(pid, 0)[1] == 0:
                self._box.renew()
                return True
        return False


def _open_last_pid(flags: int) -> int:
    """The namespace's process counter, for writing; -1 where the kernel or the jail lacks it.

    Set back before each run, it makes every program process 2, and says nothing of earlier ones
    (Documentation/admin-guide/sysctl/kernel.rst, ns_last_pid).
    """
    with contextlib.suppress(OSError):
        kernel.mount("proc", "/proc", "proc", flags, "")
        return os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC)
    return -1


def _core_limit() -> int:
    """No core files; and where the host pipes cores to a program, 1 keeps it from being started
    (fs/coredump.c: a limit of 0 does not stop a pipe, 1 does)."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/core_pattern", "rb") as file:
        return 1 if file.read(1) == b"|" else 0
    return 0


def _kill_and_reap(pid: int) -> tuple[int, float]:
    """Kill everything in the slot, wait for all of it; return the program's status and CPU s.

    Raises:
        TimeoutError: something cannot be killed; the slot must go.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all of this PID namespace but PID 1
    status, cpu_s = 0, 0.0
    deadline = time.monotonic() + _KILL_PATIENCE_S
    pause = 0.0
    while True:
        try:
            # Blocking in the common case, where the program alone is left and already dead.
            ended, code, usage = os.wait4(-1, os.WNOHANG if pause else 0)
        except ChildProcessError:
            return status, cpu_s
        if ended:
            cpu_s += usage.ru_utime + usage.ru_stime
            if ended == pid:
                status = code
            pause = 0.0005
            continue
        if time.monotonic() > deadline:
            raise TimeoutError("a killed process does not end")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
