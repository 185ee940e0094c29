"""The supervisor's directory is private, short enough for sockets, and does not pile up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard._runtime_dir import RuntimeDir
from rollyard.errors import ServiceStartError


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_it_is_private_and_goes_away(base: Path) -> None:
    with RuntimeDir() as directory:
        assert directory.path.parent == base
        assert directory.path.stat().st_mode & 0o777 == 0o700
        (directory.path / "file").touch()
    assert not list(base.iterdir())


def test_a_long_path_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = base / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with RuntimeDir() as directory:
        assert directory.path.parent != deep


def test_no_place_is_said_clearly(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        return False

    monkeypatch.setattr("os.access", refuse)
    with pytest.raises(ServiceStartError, match="TMPDIR"), RuntimeDir():
        pass


def test_what_a_killed_owner_left_is_removed_and_what_a_live_one_has_is_not(base: Path) -> None:
    program = (
        "import os\n"
        "from rollyard._runtime_dir import RuntimeDir\n"
        "with RuntimeDir() as directory:\n"
        "    print(directory.path, flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        with RuntimeDir():
            assert left.is_dir()
        owner.kill()
    assert left.is_dir()
    with RuntimeDir() as mine:
        assert sorted(base.iterdir()) == [mine.path]


def test_a_planted_link_is_not_followed(base: Path) -> None:
    victim = base / "victim"
    victim.mkdir()
    (victim / "lock").touch()
    (base / f"rollyard-{os.getuid()}-planted").symlink_to(victim)
    with RuntimeDir():
        assert victim.is_dir()
