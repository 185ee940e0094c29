"""Old guest images go; none goes under a worker that runs or starts."""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from datetime import datetime
from pathlib import Path

import live_service
import pytest
from process_tree import until

from rollyard_queue.records import LimitsSpec, RunSpec
from rollyard_sandbox import image, images
from rollyard_sandbox.execution import Execution
from rollyard_sandbox.machine import open_machine
from rollyard_sandbox.settings import WorkerSettings

BARE = ("bare",)
DISK_BYTES = 8 << 20
DAY_S = 86400.0
# A process that takes the image of a state directory into use, says so, and waits to be killed.
USER = """
import sys
from pathlib import Path
from rollyard_sandbox.image import open_image
with open_image(Path(sys.argv[1]), ("bare",)) as root:
    print(root, flush=True)
    sys.stdin.read()
"""
# The same on a read-only mount of the folder: no lock can be made, and none is needed.
READ_ONLY = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.unshare(os.CLONE_NEWNS)
place = sys.argv[1].encode()
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # private
assert libc.mount(place, place, None, 0x1000, None) == 0  # bound to itself
assert libc.mount(b"none", place, None, 0x1000 | 0x21, None) == 0  # remounted, read-only
"""


@contextlib.contextmanager
def _state() -> Generator[Path]:
    """A state directory where the jail's users can read: pytest's own are for this user alone."""
    with tempfile.TemporaryDirectory(dir=WorkerSettings().state_dir, prefix="test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with _state() as made:
        yield made


@pytest.fixture(scope="module")
def built(state: Path) -> tuple[Path, list[str]]:
    """The image, built where older ones and half ones lie; and what was said meanwhile."""
    folder = state / "images"
    for number, days in enumerate((9, 3, 1, 0)):
        _old(folder, f"py3.11-{number:016}", days * DAY_S)
    _old(folder, ".py3.11-4444444444444444-abcd1234", DAY_S)  # of a build that was killed
    (folder / "py3.11-5555555555555555.lock").touch()  # of an image that is no more
    said: list[str] = []
    return image.ensure_image(state, BARE, say=said.append), said


@pytest.fixture
def own() -> Iterator[Path]:
    """A state directory where an image is that nobody would build; enough where no jail starts."""
    with _state() as made:
        _old(made / "images", image.image_path(made, BARE).name, 0)
        yield made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds take no time: what is tested is who may when."""

    def build(staging: Path, *_: object) -> None:
        (staging / "usr").mkdir()
        (staging / "usr" / "file").write_bytes(bytes(4096))

    monkeypatch.setattr(image, "_build", build)


def _old(folder: Path, name: str, age_s: float) -> Path:
    path = folder / name
    (path / "usr").mkdir(parents=True)
    (path / "usr" / "file").write_bytes(bytes(4096))
    then = datetime.now().timestamp() - age_s
    os.utime(path, (then, then))
    return path


def _names(state: Path) -> set[str]:
    return {path.name for path in (state / "images").iterdir()}


def _in_use(state: Path) -> bool:
    (one,) = images.stored_images(state / "images")
    return one.in_use


@contextlib.contextmanager
def _user(state: Path) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", USER, str(state)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith(str(state))
            yield process
        finally:
            process.kill()


def test_a_build_removes_old_images_and_what_killed_builds_left(
    state: Path, built: tuple[Path, list[str]]
) -> None:
    root, said = built
    # Of each Python two stay, and what was used within the hour.
    kept = {"py3.11-0000000000000002", "py3.11-0000000000000003"}
    assert _names(state) == {root.name, f"{root.name}.lock", *kept}
    assert sum("0000000000000000" in line for line in said) == 1
    assert sum("0000000000000001" in line for line in said) == 1


def test_of_each_python_those_used_last_stay(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for name, days in (("py3.12-a", 1), ("py3.12-b", 5), ("py3.12-c", 3), ("py3.13-d", 9)):
        _old(folder, name, days * DAY_S)
    with images.using(folder / "py3.12-b"):
        pass  # so it was used just now
    assert [one.path.name for one in images.expendable(folder)] == ["py3.12-c"]
    images.prune(folder)
    assert sorted(one.path.name for one in images.stored_images(folder)) == [
        "py3.12-a", "py3.12-b", "py3.13-d",
    ]  # fmt: skip
    images.prune(folder, keep=0, idle_s=3600)
    assert [one.path.name for one in images.stored_images(folder)] == ["py3.12-b"]
    images.prune(folder, keep=0)
    assert _names(tmp_path) == set()


async def _prune_while_open(state: Path, before: Callable[[], None]) -> str:
    """Remove all that can be while a machine is open, then run a program in a new slot."""
    settings = WorkerSettings(slots=2, templates="bare", state_dir=state)
    async with open_machine(settings, say=lambda _: None) as machine:
        before()
        images.prune(state / "images", keep=0)
        assert _in_use(state)
        slot = await machine.pool.acquire("bare", DISK_BYTES, new=True)
        limits = LimitsSpec(timeout_s=9, cpu_s=None, memory_bytes=64 << 20, disk_bytes=DISK_BYTES,
                            pids=16, output_bytes=4096)  # fmt: skip
        spec = RunSpec(
            run_id="x", code="import fractions; print(fractions.Fraction(1, 3))", stdin=None,
            files={}, fetch_files=[], limits=limits, template="bare", on_output_limit="truncate",
            job="x",
        )  # fmt: skip
        report, _ = await Execution(slot, spec).run()
        await machine.pool.release(slot)
    return report.stdout


def test_the_image_of_a_running_worker_stays_until_it_ends(
    state: Path, built: tuple[Path, list[str]]
) -> None:
    def unlock() -> None:  # older versions hold none
        (state / "images" / f"{built[0].name}.use").unlink()

    assert asyncio.run(_prune_while_open(state, before=lambda: None)) == "1/3\n"
    assert asyncio.run(_prune_while_open(state, before=unlock)) == "1/3\n"
    images.prune(state / "images")
    assert built[0].is_dir()  # one of the two that are kept
    copy = state / "images" / "py3.99-whole"
    shutil.copytree(built[0], copy, symlinks=True, copy_function=os.link)
    os.utime(copy, (0, 0))
    with images.using(built[0]):
        images.prune(state / "images", keep=0)
    assert not copy.exists()


def test_a_worker_that_was_killed_holds_nothing(own: Path) -> None:
    with _user(own) as process:
        assert _in_use(own)
        images.prune(own / "images", keep=0)
        assert _in_use(own)
        process.kill()
        process.wait()
        assert not _in_use(own)
    images.prune(own / "images", keep=0)
    assert _names(own) == set()


def test_what_is_being_built_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    staging = _old(folder, ".py3.12-0123456789abcdef-abcd1234", DAY_S)
    with images.building(folder / "py3.12-0123456789abcdef"):
        images.prune(folder, keep=0)
        assert staging.is_dir()
    images.prune(folder, keep=0)
    assert _names(tmp_path) == set()


@pytest.mark.usefixtures("small")
def test_an_image_that_was_removed_by_hand_is_built_again_beside_its_users(own: Path) -> None:
    with _user(own):
        shutil.rmtree(image.image_path(own, BARE))
        assert image.ensure_image(own, BARE).is_dir()  # does not wait for the other to end


@pytest.mark.usefixtures("small")
def test_starting_and_removing_at_the_same_time_hurt_nobody(own: Path) -> None:
    over = threading.Event()
    removed: list[Path] = []

    def remove() -> None:
        while not over.is_set():
            images.prune(own / "images", keep=0, before=lambda one: removed.append(one.path))

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(10_000):
            with image.open_image(own, BARE) as root:
                assert (root / "usr" / "file").exists()
                os.sched_yield()
                assert (root / "usr" / "file").exists()
            if len(removed) >= 5:
                break
    finally:
        over.set()
        remover.join()
    assert len(removed) >= 5


def test_a_folder_that_is_read_only_serves_as_it_is(own: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", READ_ONLY + USER, str(own)],
        input="", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith(str(own)), done.stderr
    assert not list((own / "images").glob("*.use"))


@pytest.mark.usefixtures("small")
def test_what_cannot_be_removed_does_not_fail_a_build(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(images, "prune", refuse)
    shutil.rmtree(image.image_path(own, BARE))
    said: list[str] = []
    assert image.ensure_image(own, BARE, say=said.append).is_dir()
    assert "not yours" in said[-1]


def _command(state: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rollyard.cli", "images", *arguments],
        env={**os.environ, "ROLLYARD_STATE_DIR": str(state)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_command_lists_and_removes(own: Path) -> None:
    for number in range(3):
        _old(own / "images", f"py3.11-{number:016}", (number + 1) * DAY_S)
    with _user(own):
        first, *_ = _command(own).splitlines()
        assert first.startswith("py") and first.endswith("in use")
        listed = json.loads(_command(own, "--json"))
        assert [one["in_use"] for one in listed] == [True, False, False, False]
        assert [one["size_bytes"] for one in listed] == [4096] * 4
        assert Path(listed[3]["path"]).name == "py3.11-0000000000000002"

        assert _command(own, "prune", "--dry-run").endswith("1 images would be removed, 0 MB\n")
        assert len(images.stored_images(own / "images")) == 4
        assert _command(own, "prune", "--keep", "0").endswith("3 images removed, 0 MB\n")
        assert _in_use(own)


def test_the_templates_of_the_environment_decide_what_is_built(own: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rollyard_sandbox.image", "--state-dir", str(own)],
        env={**os.environ, "ROLLYARD_TEMPLATES": "bare"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{image.image_path(own, BARE)}\n"


@pytest.mark.parametrize(("said", "built"), [("bare, ", BARE), (" bare,bare", BARE)])
def test_templates_are_read_as_a_worker_reads_them(said: str, built: tuple[str, ...]) -> None:
    assert set(image.template_names(said)) == set(built)


@pytest.mark.parametrize(
    ("module", "variable", "value"),
    [
        ("image", "ROLLYARD_TEMPLATES", "bare,sience"),
        ("images_command", "ROLLYARD_SLOTS", "abc"),
        ("doctor", "ROLLYARD_LEASE_S", "abc"),
        ("doctor", "ROLLYARD_TEMPLATES", "sience"),
    ],
)
def test_a_wrong_setting_is_2_and_one_line(
    own: Path, module: str, variable: str, value: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"rollyard_sandbox.{module}"],
        env={**os.environ, "ROLLYARD_STATE_DIR": str(own), variable: value},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert variable in line or "templates: sience" in line


def test_what_goes_while_it_is_weighed_or_swept_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _old(tmp_path, "py3.12-a", 0)
    (one,) = images.stored_images(tmp_path)
    walk = os.walk

    def walk_late(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        found = list(walk(top))
        shutil.rmtree(path)
        yield from found

    monkeypatch.setattr(os, "walk", walk_late)
    assert one.size_bytes() == 0
    monkeypatch.undo()
    grave = _old(tmp_path, ".py3.12-a-abcd1234", 0)
    alone = images._alone  # pyright: ignore[reportPrivateUsage]

    @contextlib.contextmanager
    def alone_late(root: Path) -> Generator[None]:
        shutil.rmtree(grave, ignore_errors=True)  # by another prune, which is done by now
        with alone(root):
            yield

    monkeypatch.setattr(images, "_alone", alone_late)
    images.prune(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_while_one_waited_for_it_is_not_taken(tmp_path: Path) -> None:
    root = tmp_path / "py3.12-a"
    path = tmp_path / "py3.12-a.lock"
    path.touch()
    entered = threading.Event()

    def wait() -> None:
        with images.building(root):
            entered.set()
            left.wait()

    left = threading.Event()
    waiter = threading.Thread(target=wait)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiter.start()
        path.unlink()
    try:
        assert entered.wait(60)
        assert until(path.exists)  # a lock of its own, that the next one meets
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        left.set()
        waiter.join()


def test_the_canary_leaves_a_folder_where_another_has_made_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_service, "CANARY_FILE", tmp_path / "canary" / "secret.txt")
    monkeypatch.setattr(live_service, "CANARY_USERS", tmp_path / "canary" / "users.lock")
    monkeypatch.setattr(live_service, "canary_faults", list)
    with live_service.canaries():
        (tmp_path / "canary" / "other.lock").touch()
    assert [path.name for path in (tmp_path / "canary").iterdir()] == ["other.lock"]
