"""Landlock: a second wall beside mounts and namespaces, where the kernel has it.

Protects against: writing outside the box, TCP connections, signals and abstract sockets to
processes outside the slot, even if a mount or a namespace should be wrong.
Does not protect against: reading the image, which is no secret.
Kernel doc: Documentation/userspace-api/landlock.rst. The call numbers are the same everywhere.
"""

import ctypes
import os

from . import box, kernel

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_ASKED = 1
_PATH_BENEATH = 1
_O_PATH = 0o10000000

# LANDLOCK_ACCESS_FS_*: everything that changes something; reading and executing stay unhandled.
_WRITE_FILE = 1 << 1
_CHANGES = sum(1 << bit for bit in range(4, 13)) | _WRITE_FILE  # REMOVE_*, MAKE_*
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_CONNECT_TCP = 1 << 1
_SCOPES = 3  # abstract unix sockets, signals


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """The kernel's Landlock ABI, 0 where there is none."""
    return max(0, kernel.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_ASKED))


def restrict() -> bool:
    """Confine this process and all its children for ever; False where the kernel cannot.

    Raises:
        OSError: the kernel has Landlock but refuses the rules.
    """
    abi = version()
    if abi < 1:
        return False
    files = _CHANGES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    rules = _Ruleset(files, _CONNECT_TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = kernel.syscall(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    try:
        _allow(ruleset, box.ROOT, files)
        opened = _WRITE_FILE | (_TRUNCATE if abi >= 3 else 0)
        _allow(ruleset, "/dev", opened)  # null and its like; the nodes are all there is
        _allow(ruleset, "/proc", opened)  # its own entries, as far as their modes allow
        if kernel.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, access: int) -> None:
    beneath = os.open(path, _O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(access, beneath)
        if kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    finally:
        os.close(beneath)
