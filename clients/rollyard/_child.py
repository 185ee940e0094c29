"""One supervised child process: it cannot outlive its parent, and its last log lines are kept.

The child leads a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone
(which then stops the parts in order), and so that whatever the child leaves in its process group
can be killed with it.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

LOG_LINES_KEPT = 60
LOG_LINE_BYTES = 64 * 1024  # a longer line is cut, so that a child cannot fill our memory
_PR_SET_PDEATHSIG = 1

LogSink = Callable[[str, str], None]
"""Takes a part's name and one line of its log."""


def discard(name: str, line: str) -> None:
    """A LogSink for those who do not want the lines."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of ours with this interpreter.

    ``-P`` keeps the current directory off the path: a stray ``redis.py`` must not be imported.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


class Child:
    """A named child process. All methods belong to one event loop in the main thread.

    PR_SET_PDEATHSIG follows the *thread* that forked; the supervisor starts children from its
    only one.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: LogSink,
        env: Mapping[str, str],
    ) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._command = command
        self._env = {**env, "PYTHONUNBUFFERED": "1"}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id, or 0 before the first start."""
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        """Exit code (negative: signal) once the process has ended, else None."""
        return self._process.returncode if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process; it gets SIGKILL from the kernel when this process dies.

        Raises:
            OSError: the program cannot be executed.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()),
            limit=LOG_LINE_BYTES,
        )
        assert self._process.stdout is not None
        self._reader = asyncio.create_task(self._read_log(self._process.stdout))

    async def wait(self) -> int:
        """Wait until the process has ended and its log was read; return its exit code."""
        assert self._process is not None
        code = await self._process.wait()
        if self._reader is not None:
            # A grandchild that keeps the pipe open must not hold us up.
            await asyncio.wait([self._reader], timeout=1)
            self._reader.cancel()
        return code

    async def stop(self, *, timeout_s: float) -> bool:
        """Ask the process to stop, wait, and kill what is left of its group.

        Returns:
            False when it had to be killed.
        """
        if self._process is None:
            return True
        clean = True
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                clean = False
        self.kill()
        await self.wait()
        return clean

    def kill(self) -> None:
        """Kill the process and its group at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                line = error.partial
                if not line:
                    return
            except asyncio.LimitOverrunError as error:
                line = await stream.readexactly(error.consumed)
            text = line.decode(errors="replace").rstrip()
            self.tail.append(text)
            self._log(self.name, text)


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)  # loaded before the fork: the child must not allocate much

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died between fork and prctl
            os._exit(1)

    return prepare
