"""A slot: a set of namespaces in which one program at a time lives; this is its PID 1.

Protects against: a program that lies about how it ended (the report is made here, from wait
status, our clock and the pipes), survives its end, or leaves anything behind.
PID 1 has another user than the program, holds the only descriptors that matter, and is under the
same system-call filter.
"""

import contextlib
import json
import mmap
import os
import resource
import select
import signal
import socket
import time
import traceback
from typing import Any, NoReturn

from . import box, child, filter, frames, kernel
from .output import KeptOutput

_KILL_PATIENCE_S = 10.0
_READ_BYTES = 65536
_MAX_FETCHED_BYTES = 16 * 1024 * 1024
_MAX_FETCHED_FILES = 64
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A program that waits for a core because its neighbours are busy gets the waited time back, up to
# this multiple of its limit; so an overloaded machine is not reported as a slow program.
_STARVATION_GRACE = 2.0

_RLIMITS = (
    (resource.RLIMIT_CORE, 0),
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
    except BaseException:
        with contextlib.suppress(OSError):
            frames.send_frame(sock, json.dumps({"fault": traceback.format_exc()}).encode())
    os._exit(status)  # PID 1: the kernel kills whatever is left of the slot


class Slot:
    def __init__(self, sock: socket.socket, uid: int, disk_bytes: int) -> None:
        self._sock = sock
        self._uid = uid
        self._begun = mmap.mmap(-1, mmap.PAGESIZE)
        os.unshare(os.CLONE_NEWNS | os.CLONE_NEWIPC | os.CLONE_NEWNET | os.CLONE_NEWUTS)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("proc", "/proc", "proc", flags, "subset=pid,hidepid=invisible")
        self._box = box.Box(disk_bytes, uid)
        for what, bound in _RLIMITS:
            # The hard limit may already be lower; raising it would need a privilege.
            _, hard = resource.getrlimit(what)
            lowered = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(what, (lowered, lowered))
        kernel.close_capabilities()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        if filter.supported():
            kernel.install_filter(filter.program())
        frames.send_frame(sock, b'{"ready":true}')

    def serve(self) -> None:
        while (body := frames.recv_frame(self._sock)) is not None:
            job = json.loads(body)
            if "cancel" in job:  # it crossed with the end of the run that it meant
                continue
            report = self._run(job)
            try:
                self._box.empty()
            except (OSError, RecursionError, box.NotEmptied) as error:
                report["dirty"] = str(error)
            frames.send_frame(self._sock, json.dumps(report, ensure_ascii=False).encode())
            if "dirty" in report:
                return

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        limits = job["limits"]
        stdin_read, stdin_write = os.pipe2(os.O_CLOEXEC)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        self._begun[0] = 0
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                child.confine(limits, self._uid, stdin_read, out_write, err_write)
                child.run(job["code"], job["files"], self._begun)
            finally:  # child.run never returns and never raises once the program has begun
                os.write(2, traceback.format_exc().encode())
                os._exit(1)
        for end in (stdin_read, out_write, err_write):
            os.close(end)
        stdout, stderr = KeptOutput(limits["output_bytes"]), KeptOutput(limits["output_bytes"])
        watch = Watch(self._sock, pid, started, limits, job["on_output_limit"] == "stop")
        watch.take(stdin_write, job["stdin"], {out_read: stdout, err_read: stderr})
        try:
            watch.until_end()
            ended = time.monotonic()
            status, cpu_s = _kill_and_reap(pid)
            watch.drain()
        finally:
            watch.close()
        if not self._begun[0] and watch.killed is None:
            return {"fault": f"the program could not be started: {stderr.text()}"}
        files = job["fetch_files"]
        return {
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "killed": watch.killed,
            "waited_ms": round(watch.waited_s * 1e3, 3),
            "wall_ms": round((ended - started) * 1e3, 3),
            "cpu_ms": round(cpu_s * 1e3, 3),
            "stdout": stdout.text(),
            "stderr": stderr.text(),
            "stdout_truncated": stdout.truncated,
            "stderr_truncated": stderr.truncated,
            "files": box.fetch(files, _MAX_FETCHED_BYTES, _MAX_FETCHED_FILES) if files else {},
        }


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
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # born between the first signal and its parent's death
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


class Watch:
    """Follows one program until it ends or must end."""

    # Plain attributes: each page that PID 1 touches after a fork is copied.
    __slots__ = (
        "_pidfd", "_poll", "cpu_s", "killed", "pending", "sock", "started", "stdin",
        "stop_at_limit", "streams", "timeout_s", "waited_s",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, pid: int, started: float, limits: dict[str, Any], stop: bool
    ) -> None:
        self.sock = sock
        self.started = started
        self.timeout_s: float = limits["timeout_s"]
        self.cpu_s: float | None = limits["cpu_s"]
        self.stop_at_limit = stop
        self.killed: str | None = None
        self.waited_s = 0.0
        self.stdin = -1
        self.pending = memoryview(b"")
        self.streams: dict[int, KeptOutput] = {}
        self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._poll.register(sock, select.POLLIN)

    def take(self, stdin: int, text: str | None, streams: dict[int, KeptOutput]) -> None:
        """Own these pipe ends: feed one, read the others, close all in close()."""
        self.streams = streams
        for stream in streams:
            os.set_blocking(stream, False)
            self._poll.register(stream, select.POLLIN)
        if not text:
            os.close(stdin)
            return
        self.stdin = stdin
        self.pending = memoryview(text.encode())
        os.set_blocking(stdin, False)
        self._poll.register(stdin, select.POLLOUT)

    def until_end(self) -> None:
        """Return when the first process has ended, or when ``killed`` says why it must."""
        due = self.started + min(self.timeout_s, self.cpu_s or self.timeout_s)
        while self.killed is None:
            now = time.monotonic()
            if now >= due:
                due = self._next_check(now)
                continue
            for ready, events in self._poll.poll((due - now) * 1e3 + 1):
                if ready == self._pidfd:
                    return
                self._serve(ready, events)

    def _serve(self, ready: int, events: int) -> None:
        if ready == self.stdin:
            self._feed()
        elif ready == self.sock.fileno():
            self._hear()
        elif not self._read(ready):
            self._poll.unregister(ready)

    def _hear(self) -> None:
        # The only thing that a worker says during a run is that it should stop.
        if frames.recv_frame(self.sock) is None:
            os._exit(0)  # the worker is gone: PID 1's end takes the whole slot with it
        self.killed = "cancelled"

    def _feed(self) -> None:
        try:
            self.pending = self.pending[os.write(self.stdin, self.pending[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # nobody reads any more
            self.pending = self.pending[:0]
        if not self.pending:
            self._poll.unregister(self.stdin)
            os.close(self.stdin)
            self.stdin = -1

    def _read(self, stream: int) -> bool:
        """Take what is there; False at end of file."""
        try:
            data = os.read(stream, _READ_BYTES)
        except BlockingIOError:
            return True
        kept = self.streams[stream]
        kept.add(data)
        if self.stop_at_limit and kept.truncated and self.killed is None:
            self.killed = "output_limit"
        return bool(data)

    def _next_check(self, now: float) -> float:
        """Decide whether a limit is reached; return when to look again."""
        used, waited = _cpu_and_wait_s()
        if self.cpu_s is not None and used >= self.cpu_s:
            self.killed = "cpu_timeout"
            return now
        wall = now - self.started
        starved = max(0.0, min(waited, wall - used, self.timeout_s * _STARVATION_GRACE))
        if wall - starved >= self.timeout_s:
            self.waited_s = starved
            self.killed = "timeout"
            return now
        left = self.timeout_s - (wall - starved)
        if self.cpu_s is not None:
            left = min(left, self.cpu_s - used)
        return now + max(left, 0.005)

    def drain(self) -> None:
        """Take what the program wrote before its end; all writers are dead by now."""
        for stream, kept in self.streams.items():
            with contextlib.suppress(BlockingIOError):
                while data := os.read(stream, _READ_BYTES):
                    kept.add(data)

    def close(self) -> None:
        for descriptor in (self._pidfd, self.stdin, *self.streams):
            if descriptor >= 0:
                os.close(descriptor)


def _cpu_and_wait_s() -> tuple[float, float]:
    """CPU seconds of all processes of the run, and the longest that a thread waited for a core."""
    used, waited = 0.0, 0.0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
            used += sum(map(int, fields[11:15])) / _TICKS_PER_S  # utime stime cutime cstime
            for task in os.listdir(f"/proc/{name}/task"):
                with open(f"/proc/{name}/task/{task}/schedstat", "rb") as file:
                    waited = max(waited, int(file.read().split()[1]) / 1e9)
    return used, waited
