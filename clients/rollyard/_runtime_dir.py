"""The supervisor's private directory: mode 0700, holds its sockets, gone when it stops.

A supervisor that was killed with SIGKILL cannot remove its own, so each start removes those of
dead ones: a directory whose lock nobody holds belongs to nobody.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from rollyard.errors import ServiceStartError

SOCKET_PATH_BYTES = 107  # sun_path holds 108 with its terminating NUL
_LONGEST_NAME = "gateway.sock"


class RuntimeDir:
    """A private temporary directory, locked while this process lives.

    Raises (on entering):
        ServiceStartError: no place is short enough for a Unix socket, or writable.
    """

    path: Path

    def __enter__(self) -> Self:
        prefix = f"rollyard-{os.getuid()}-"
        base = _short_base(prefix)
        _sweep(base, prefix)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))  # mkdtemp makes it 0700
        except OSError as error:
            raise ServiceStartError(
                f"cannot make a runtime directory in {base}: {error}"
            ) from error
        # Locked before it has the name that a sweep looks for: it is never seen unlocked.
        unnamed = self.path / "lock.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / "lock")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _short_base(prefix: str) -> Path:
    wanted = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]  # noqa: S108
    for place in wanted:
        if not place or not os.access(place, os.W_OK | os.X_OK):
            continue
        longest = Path(place) / f"{prefix}12345678" / _LONGEST_NAME
        if len(os.fsencode(longest)) <= SOCKET_PATH_BYTES:
            return Path(place)
    raise ServiceStartError(
        "no writable directory whose path is short enough for a Unix socket "
        f"({SOCKET_PATH_BYTES} bytes); set TMPDIR to a short path"
    )


def _sweep(base: Path, prefix: str) -> None:
    for left in base.glob(f"{prefix}*"):
        try:
            if left.is_symlink() or left.stat().st_uid != os.getuid():
                continue
            lock = os.open(left / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # just made, or just removed, by another supervisor
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)
