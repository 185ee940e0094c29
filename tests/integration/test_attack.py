"""``rollyard doctor --attack``: all attempts are held here, and a wall that is missing is seen."""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from changed_guest import change_guest

from rollyard_sandbox.attack import as_text, attack
from rollyard_sandbox.attempts import ATTEMPTS
from rollyard_sandbox.settings import WorkerSettings

SETTINGS = WorkerSettings(slots=2, templates="bare")


def _doctor(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rollyard.cli", "doctor", "--attack", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_every_attempt_is_held_on_this_machine() -> None:
    done = _doctor("--json")
    facts = json.loads(done.stdout)
    assert [one for one in facts["attempts"] if not one["held"]] == []
    assert (done.returncode, facts["ok"]) == (0, True)
    assert len(facts["attempts"]) == len(ATTEMPTS) >= 25
    table = as_text(facts, as_json=False).splitlines()
    assert len(table) == len(ATTEMPTS) + len(facts["channels"]) + 2
    assert table[-1] == f"{len(ATTEMPTS)} attempts, all held. Known channels: SECURITY.md."
    # Said to be open, it really is: a closed one must leave the list, and SECURITY.md.
    assert [one["name"] for one in facts["channels"] if one["bits_per_s"]] == ["file locks"]


def test_where_nothing_can_be_tried_the_exit_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLYARD_NSJAIL", "/nonexistent/nsjail")
    done = _doctor()
    assert done.returncode == 1, done
    assert "Nothing could be tried: " in done.stdout


WALLS = {
    "filter": ("slot.py", "if filter.supported():", "if False:",
               {"namespaces", "io_uring", "shared objects", "x32 calls", "terminal"}),
    "user": ("child.py", "os.setresuid(uid, uid, uid)", "pass", {"signals"}),
    "descriptors": ("child.py", "os.closerange(3, 1 << 30)", "pass", {"descriptors"}),
    "core limit": ("slot.py", "(resource.RLIMIT_CORE, core_bytes)",
                   "(resource.RLIMIT_CORE, resource.RLIM_INFINITY)", {"core files"}),
    "capabilities": ("slot.py", "kernel.close_capabilities()", "pass", {"set-user-id"}),
    "cleaning": ("box.py", "_delete(path, budget)", "pass", {"earlier files"}),
    "own memory": ("slot.py", "self._begun[0] = 0",
                   "self._begun[0] = 0\n"
                   "        kept = globals().setdefault('kept', [])\n"
                   "        kept.append(os.pread(descriptors[0], 1 << 20, 0))",
                   {"earlier memory"}),
}  # fmt: skip


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the jail's users can reach it: pytest's own folders are for this user alone."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.mark.parametrize("wall", WALLS)
def test_a_missing_wall_is_seen(wall: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    file, old, new, wanted = WALLS[wall]
    change_guest(monkeypatch, folder, file, old, new)
    verdicts, _ = asyncio.run(attack(SETTINGS, say=lambda _: None))
    through = {one.name: one.detail for one in verdicts if not one.held}
    assert wanted <= through.keys(), through
    assert all(through.values()), "what got through is named"
