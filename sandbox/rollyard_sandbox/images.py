"""The folder of guest images: who uses which, and which may go.

Beside an image lie two locks. Who uses the image holds NAME.use, shared with others; who builds it
holds NAME.lock alone; who removes it holds both alone, and does not wait for them. The kernel takes
a lock from a process that ends, however that ends. So no image is removed under a worker that runs
or starts, of this version or another. Versions before this did not hold NAME.use: an image that is
the root directory of some process counts as used too.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

KEPT = 2
"""Images of each Python version that stay, used or not: this version's and the one before."""
IDLE_S = 3600.0
"""A build removes only what nobody used for so long: two versions may take turns here."""


@dataclass(frozen=True)
class StoredImage:
    """One image, and when something last began to use it, by this machine's clock."""

    path: Path
    used: datetime
    in_use: bool

    @property
    def idle_s(self) -> float:
        """Seconds since then."""
        return (datetime.now(UTC) - self.used).total_seconds()

    @property
    def python(self) -> str:
        """The version that its name begins with, such as ``py3.12``."""
        return self.path.name.partition("-")[0]

    def size_bytes(self) -> int:
        """What it takes on the disk."""
        sizes: dict[int, int] = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # somebody removes it just now
                    stat = Path(folder, name).lstat()
                    sizes[stat.st_ino] = stat.st_blocks * 512
        return sum(sizes.values())


@contextlib.contextmanager
def building(root: Path) -> Generator[None]:
    """Wait until nobody else builds or removes the image at ``root``; then be alone in that."""
    with _locked(_build_lock(root), fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def using(root: Path) -> Generator[None]:
    """Nobody removes the image at ``root`` in this block, if it is there when that begins."""
    with contextlib.ExitStack() as stack:
        # In a folder that is read-only, and has no lock, nobody removes anything either.
        with contextlib.suppress(OSError):
            stack.enter_context(_locked(_use_lock(root), fcntl.LOCK_SH))
            os.utime(_use_lock(root))
        yield


def stored_images(folder: Path) -> list[StoredImage]:
    """The images of a folder, those used last first."""
    roots = _roots()
    found: list[StoredImage] = []
    for path in folder.glob("py*-*"):
        with contextlib.suppress(FileNotFoundError):  # somebody removes it just now
            if path.is_dir():
                found.append(StoredImage(path, _last_used(path), _is_used(path, roots)))
    return sorted(found, key=lambda image: image.used, reverse=True)


def expendable(folder: Path, *, keep: int = KEPT, idle_s: float = 0.0) -> list[StoredImage]:
    """The images that nobody uses, nor used in the last ``idle_s`` seconds, but for some.

    Of each Python version the ``keep`` images that were used last stay.
    """
    of_python: Counter[str] = Counter()
    found: list[StoredImage] = []
    for image in stored_images(folder):
        of_python[image.python] += 1
        if of_python[image.python] > keep and image.idle_s > idle_s and not image.in_use:
            found.append(image)
    return found


def prune(
    folder: Path,
    *,
    keep: int = KEPT,
    idle_s: float = 0.0,
    before: Callable[[StoredImage], None] = lambda _: None,
) -> None:
    """Remove what is :func:`expendable`, and what killed builds have left.

    Args:
        folder: where the images lie.
        keep: see :func:`expendable`.
        idle_s: see :func:`expendable`.
        before: told of each image before it goes.

    Raises:
        OSError: this user may not change the folder.
    """
    for image in expendable(folder, keep=keep, idle_s=idle_s):
        with contextlib.suppress(BlockingIOError), _alone(image.path):
            # Looked at again: a worker of an older version may have started, or somebody else
            # may have removed it.
            if image.path.is_dir() and not _is_root(image.path, _roots()):
                before(image)
                _remove(image.path)
    _sweep(folder)


def _remove(root: Path) -> None:
    """Remove an image that is ours alone; what has its name is whole until nothing has it."""
    grave = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    root.rename(grave)
    shutil.rmtree(grave)
    _remove_locks(root)


def _sweep(folder: Path) -> None:
    """Remove what killed builds and removals left, and locks of images that are not there."""
    for left in folder.glob(".py*-*-*"):
        root = folder / left.name.removeprefix(".").rpartition("-")[0]
        with contextlib.suppress(BlockingIOError), _alone(root):
            if left.exists():  # not removed before it was ours alone
                shutil.rmtree(left)
    for lock in (*folder.glob("py*.lock"), *folder.glob("py*.use")):
        root = lock.with_suffix("")
        if not root.exists():
            with contextlib.suppress(BlockingIOError), _alone(root):
                if not root.exists():
                    _remove_locks(root)


def _remove_locks(root: Path) -> None:
    for lock in (_build_lock(root), _use_lock(root)):
        lock.unlink(missing_ok=True)


_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB


def _build_lock(root: Path) -> Path:
    return root.with_name(f"{root.name}.lock")


def _use_lock(root: Path) -> Path:
    return root.with_name(f"{root.name}.use")


@contextlib.contextmanager
def _alone(root: Path) -> Generator[None]:
    """Hold both locks, or raise BlockingIOError."""
    with _locked(_build_lock(root), _AT_ONCE), _locked(_use_lock(root), _AT_ONCE):
        yield


@contextlib.contextmanager
def _locked(path: Path, operation: int, *, create: bool = True) -> Generator[None]:
    """Hold the lock in a file.

    Raises:
        BlockingIOError: ``operation`` has LOCK_NB, and somebody else holds it.
        OSError: it is not there and cannot be made.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    while True:
        lock = os.open(path, flags, 0o644)
        try:
            fcntl.flock(lock, operation)
            if os.fstat(lock).st_nlink:  # else it was removed, with its image, while we waited
                yield
                return
        finally:
            os.close(lock)


def _last_used(root: Path) -> datetime:
    times = [root.stat().st_mtime]  # when it was built
    with contextlib.suppress(OSError):
        times.append(_use_lock(root).stat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC)


def _is_used(root: Path, roots: set[tuple[int, int]]) -> bool:
    if _is_root(root, roots):
        return True
    try:
        with _locked(_use_lock(root), _AT_ONCE, create=False):
            return False
    except BlockingIOError:
        return True
    except PermissionError:
        return True  # not ours to say
    except FileNotFoundError:  # never used by a version that holds it
        return False


def _is_root(root: Path, roots: set[tuple[int, int]]) -> bool:
    stat = root.stat()
    return (stat.st_dev, stat.st_ino) in roots


def _roots() -> set[tuple[int, int]]:
    """Devices and inodes of the root directories of all processes that this user may look at."""
    return set(_each_root())


def _each_root() -> Iterator[tuple[int, int]]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
                stat = (process / "root").stat()
                yield stat.st_dev, stat.st_ino
