"""Following one program from outside: its pipes, its clock, and what the worker says meanwhile."""

import contextlib
import os
import select
import socket
import time

from . import frames
from .output import KeptOutput

_READ_BYTES = 65536
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A program that waits for a core because its neighbours are busy gets the waited time back, up to
# this multiple of its limit; so an overloaded machine is not reported as a slow program.
_STARVATION_GRACE = 2.0


class Watch:
    """Follows one program until it ends or must end."""

    # Plain attributes: each page that PID 1 touches after a fork is copied.
    __slots__ = (
        "_pidfd", "_poll", "cpu_s", "killed", "pending", "sock", "started", "stdin",
        "stop_at_limit", "streams", "timeout_s", "waited_s",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, pid: int, started: float, timeout_s: float,
        cpu_s: float | None, stop_at_limit: bool,
    ) -> None:  # fmt: skip
        self.sock = sock
        self.started = started
        self.timeout_s = timeout_s
        self.cpu_s = cpu_s
        self.stop_at_limit = stop_at_limit
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
