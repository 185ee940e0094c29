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
import signal
import socket
import time
import traceback
from typing import Any, NoReturn

from . import box, child, filter, frames, kernel, programs
from .output import KeptOutput
from .watch import Watch

_KILL_PATIENCE_S = 10.0
_MAX_FETCHED_BYTES = 16 * 1024 * 1024
_MAX_FETCHED_FILES = 64

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
        steps = programs.steps(job)
        for step in steps[:-1]:
            report = self._step(job, step, None)
            if report.get("exit_code") != 0:
                report["phase"] = step.phase
                return report
        return self._step(job, steps[-1], job["stdin"])

    def _step(self, job: dict[str, Any], step: programs.Step, stdin: str | None) -> dict[str, Any]:
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
                step.start(job, self._begun)
            finally:  # start never returns and never raises once the program has begun
                os.write(2, traceback.format_exc().encode())
                os._exit(1)
        for end in (stdin_read, out_write, err_write):
            os.close(end)
        stdout, stderr = KeptOutput(limits["output_bytes"]), KeptOutput(limits["output_bytes"])
        watch = Watch(
            self._sock, pid, started, step.timeout_s, limits["cpu_s"],
            job["on_output_limit"] == "stop",
        )  # fmt: skip
        watch.take(stdin_write, stdin, {out_read: stdout, err_read: stderr})
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
