"""A template's memory made cheap to fork: what it holds is the same, and forks still work."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollyard_sandbox import jail
from rollyard_sandbox.guest.mappings import Mapping, to_join

READ, DATA, CODE = 1, 3, 5
MAPS = (
    # One library as the loader leaves it, and its neighbours.
    ("7f0000000000", "7f0000001000", READ, "/lib/a.so"),
    ("7f0000001000", "7f0000003000", CODE, "/lib/a.so"),
    ("7f0000003000", "7f0000004000", READ, "/lib/a.so"),
    ("7f0000004000", "7f0000005000", READ, "/lib/a.so"),
    ("7f0000005000", "7f0000006000", DATA, "/lib/a.so"),
    ("7f0000006000", "7f0000007000", DATA, ""),
)


def _mappings(rows: tuple[tuple[str, str, int, str], ...]) -> list[Mapping]:
    base = int(rows[0][0], 16)
    return [
        Mapping(int(start, 16), int(end, 16), protection, True,
                int(start, 16) - base if name else 0, name)
        for start, end, protection, name in rows
    ]  # fmt: skip


def test_a_librarys_parts_get_the_protection_of_their_neighbours() -> None:
    mappings = _mappings(MAPS)
    joined = {mapping.start & 0xFFFF: protection for mapping, protection in to_join(mappings)}
    assert joined == {0x0000: CODE, 0x3000: CODE, 0x4000: DATA}


def test_a_file_that_is_only_read_keeps_its_protection() -> None:
    rows = (("7f0000000000", "7f0000001000", READ, "/usr/lib/locale/C.utf8/LC_CTYPE"),)
    assert list(to_join(_mappings(rows))) == []


def test_parts_of_two_libraries_are_not_joined() -> None:
    rows = (
        ("7f0000000000", "7f0000001000", CODE, "/lib/a.so"),
        ("7f0000001000", "7f0000002000", READ, "/lib/b.so"),
    )
    assert list(to_join(_mappings(rows))) == []


# Runs in an interpreter of its own, with the package under the name that it has in the jail.
_PROGRAM = """
import ctypes, gc, json, os, sys
sys.path.insert(0, sys.argv[1])
from rollyard_guest import immortal, mappings
known = {"numbers": list(range(50_000)), "text": "ä" * 10_000,
         "nested": [{"a": i} for i in range(999)]}
room = bytearray(8 << 20)  # from calloc, and never written
before = json.dumps(known)
count = immortal.make_immortal()
gc.freeze()
mappings.join_libraries()
shared = mappings.share_written()
assert json.dumps(known) == before
lines = open("/proc/self/maps").read().splitlines()
warm = [line for line in lines if "rollyard-warm" in line]
absent = 0
for line in warm:
    start, end = (int(address, 16) for address in line.split()[0].split("-"))
    seen = (ctypes.c_ubyte * ((end - start) // 4096))()
    span = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
    assert ctypes.CDLL(None).mincore(*span, seen) == 0
    absent += sum(1 for page in seen if not page & 1)
first, second = sys.getrefcount(known), sys.getrefcount(object())
pid = os.fork()
if pid == 0:
    known["numbers"].reverse()
    assert not any(room)
    room[:] = b"x" * len(room)
    known["nested"].append([0] * 100_000)
    os._exit(0 if sum(known["numbers"]) == sum(range(50_000)) else 1)
status = os.waitpid(pid, 0)[1]
print(json.dumps({
    "absent": absent, "room": sum(map(bool, room)), "count": count,
    "shared": shared, "warm": warm, "immortal": first, "mortal": second,
    "status": status, "same": json.dumps(known) == before,
    "descriptors": [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{n}")],
}))
"""


def _in_an_interpreter(code: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", _PROGRAM, str(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory_moved_into_a_file_holds_what_it_held_and_forks_do_not_share_writes(
    tmp_path: Path,
) -> None:
    found = _in_an_interpreter(jail.guest_code(tmp_path))
    assert found["shared"] is True
    assert found["warm"]
    assert found["same"] is True
    assert found["status"] == 0
    # Private mappings only: the file itself cannot be reached, and is sealed.
    assert all(line.split()[1].endswith("p") for line in found["warm"])
    assert not [name for name in found["descriptors"] if "rollyard-warm" in name]


def test_no_process_fills_the_file_for_others(tmp_path: Path) -> None:
    # A hole would be filled by the first program that reads it: for all, who can see it.
    found = _in_an_interpreter(jail.guest_code(tmp_path))
    assert found["warm"]
    assert found["absent"] == 0
    assert found["room"] == 0


def test_what_was_loaded_is_immortal_and_what_comes_later_is_not(tmp_path: Path) -> None:
    found = _in_an_interpreter(jail.guest_code(tmp_path))
    assert isinstance(found["count"], int)
    assert found["count"] > 10_000
    assert found["immortal"] == 0xFFFFFFFF
    assert found["mortal"] == 1


def test_without_a_compiler_a_template_forks_as_any_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert shutil.which("cc") is None
    found = _in_an_interpreter(jail.guest_code(tmp_path))
    assert found["shared"] is False
    assert found["warm"] == []
    assert found["status"] == 0
