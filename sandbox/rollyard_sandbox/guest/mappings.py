"""What a template's memory looks like to the kernel, made cheap to fork.

A fork copies one record for each mapping, and a page-table entry for each page of a mapping that
was ever written. A science template has 1,070 mappings and 32,000 such pages: measured, 8.5 ms of
CPU for fork, ``print`` and exit. Here

- neighbouring parts of a shared library get one protection, so that the kernel joins them, and
- written memory is moved into a sealed memory file that is mapped back privately: unwritten again
  in the kernel's eyes, it has no entries to copy, and a fork reads the file's pages as it needs
  them and copies those that it writes. Longer zeros (buffers not yet used) are anonymous memory.

Together 1.8 ms, in the same sitting. Both only change how a process's own memory is laid out;
code in it could always change that by itself, so no wall depends on it.
"""

import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import kernel

PROT_READ, PROT_WRITE, PROT_EXEC = 1, 2, 4
_PROTECTIONS = {"r": PROT_READ, "w": PROT_WRITE, "x": PROT_EXEC, "-": 0}
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# The kernel's own, and the stack that rollyard_remap runs on.
_STAYS = ("[stack]", "[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]")
_SPARE = 16  # regions that reading the list itself may add
LIBRARY = Path(__file__).with_name("remap.so")


class Mapping(NamedTuple):
    """One line of /proc/self/maps (proc_pid_maps(5))."""

    start: int
    end: int
    protection: int
    private: bool
    offset: int
    name: str

    def continues(self, other: "Mapping") -> bool:
        """True when this follows ``other`` in memory and in one file."""
        return (
            other.name == self.name
            and other.end == self.start
            and self.offset - other.offset == self.start - other.start
        )


def read() -> list[Mapping]:
    """This process's mappings, by address."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        return [_parse(line) for line in file]


def _parse(line: str) -> Mapping:
    span, flags, offset, _, _, *name = line.split(maxsplit=5)
    start, end = (int(address, 16) for address in span.split("-"))
    protection = sum(_PROTECTIONS[flag] for flag in flags[:3])
    return Mapping(
        start, end, protection, flags[3] == "p", int(offset, 16), name[0].strip() if name else ""
    )


def join_libraries() -> None:
    """Give a library's read-only parts its code's protection, and what was made read-only after
    relocation its data's: two mappings where the loader made five."""
    for mapping, protection in to_join(read()):
        kernel.mprotect(mapping.start, mapping.end - mapping.start, protection)


def to_join(mappings: list[Mapping]) -> Iterator[tuple[Mapping, int]]:
    """The parts whose protection can become their neighbour's, with that protection."""
    neighbours = zip([None, *mappings[:-1]], mappings, [*mappings[1:], None], strict=True)
    for before, mapping, after in neighbours:
        if mapping.protection != PROT_READ or not mapping.name.startswith("/"):
            continue
        if after and after.continues(mapping) and after.protection == PROT_READ | PROT_WRITE:
            yield mapping, after.protection
        elif (after and after.continues(mapping) and after.protection & PROT_EXEC) or (
            before and mapping.continues(before) and before.protection & PROT_EXEC
        ):
            yield mapping, PROT_READ | PROT_EXEC


def share_written() -> bool:
    """Move written memory into a sealed memory file, mapped privately; False without the library
    that does it (no C compiler where the worker runs).

    Raises:
        OSError: the kernel refuses; memory is unharmed.
    """
    if not LIBRARY.exists():
        return False
    library = ctypes.CDLL(str(LIBRARY))
    remap = library.rollyard_remap
    remap.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long)
    remap.restype = ctypes.c_long
    file = os.memfd_create("rollyard-warm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Programs are other users: mincore(2) tells only who could write a file what is in memory.
        os.fchmod(file, 0o400)
        # Made before the list is read: making it may add a mapping.
        table = (ctypes.c_ulong * (4 * (len(_written(read())) + _SPARE)))()
        regions = _written(read())
        if 4 * len(regions) > len(table):
            return False
        offset = 0
        for index, region in enumerate(regions):
            length = region.end - region.start
            table[4 * index : 4 * index + 4] = [region.start, length, offset, region.protection]
            offset += length
        os.ftruncate(file, offset)
        result = remap(file, ctypes.addressof(table), len(regions))
        if result != 0:
            raise OSError(-result, f"cannot map warm memory: {os.strerror(-result)}")
        # No process that gets hold of the file can change what others read.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    finally:
        os.close(file)
    return True


def _written(mappings: list[Mapping]) -> list[Mapping]:
    return [
        mapping
        for mapping in mappings
        if mapping.private and mapping.protection & PROT_WRITE and mapping.name not in _STAYS
    ]
