"""Guest code in which one line is another: a wall taken down, to see that it is missed."""

import shutil
from pathlib import Path

import pytest

from rollyard_sandbox import jail


def change_guest(patch: pytest.MonkeyPatch, folder: Path, file: str, old: str, new: str) -> None:
    """Let jails that are started from now on run a copy, in ``folder``, of the guest package.

    Args:
        patch: undone when the test ends.
        folder: empty or from an earlier change, and where the jail's users can reach it (pytest's
            own folders are for this user alone).
        file: name of the module to change.
        old: a text that it must have.
        new: what stands there instead.
    """
    real = jail.guest_code

    def changed(state_dir: Path) -> Path:
        shutil.copytree(real(state_dir), folder, dirs_exist_ok=True)
        path = next(folder.rglob(file))
        text = path.read_text()
        assert old in text, f"{file} has no {old!r} any more"
        path.write_text(text.replace(old, new))
        for place in (folder, *folder.rglob("*")):
            place.chmod(0o755)
        return folder

    patch.setattr(jail, "guest_code", changed)
