"""The few kernel calls that the standard library lacks, through libc."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
# Declared once: a call then makes no object for each argument, and runs in every fork.
_prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_CAP_AMBIENT = 4, 22, 24, 47
SECCOMP_MODE_FILTER = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def syscall(number: int, *arguments: object) -> int:
    """A system call that libc has no function for; -1 and ctypes.get_errno() on failure."""
    return int(_libc.syscall(number, *arguments))


def mount(source: str, target: str, fstype: str, flags: int, options: str) -> None:
    """mount(2); raises OSError."""
    done = _libc.mount(
        source.encode(), target.encode(), fstype.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(done, f"mount {fstype} on {target}")


def mprotect(address: int, length_bytes: int, protection: int) -> None:
    """mprotect(2) on whole pages; raises OSError."""
    done = _libc.mprotect(
        ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), ctypes.c_int(protection)
    )
    _check(done, "mprotect")


def prctl(option: int, value: int = 0, argument: int = 0) -> None:
    """prctl(2) with up to two integer arguments; raises OSError."""
    if _prctl(option, value, argument, 0, 0) != 0:
        _check(-1, f"prctl {option}")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_CAPABILITY_VERSION_3 = 0x20080522


def close_capabilities() -> None:
    """Empty the bounding, ambient and inheritable sets: no exec can ever gain one again.

    What this process holds it keeps, until it changes its user.
    """
    header, data = _CapabilityHeader(_CAPABILITY_VERSION_3, 0), (_CapabilityData * 2)()
    _check(_libc.capget(ctypes.byref(header), data), "capget")
    for half in data:
        half.inheritable = 0
    _check(_libc.capset(ctypes.byref(header), data), "capset")
    prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # the first number past the kernel's last capability
            return


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(instructions: bytes) -> None:
    """Add a seccomp filter (BPF, 8 bytes an instruction) to this thread; raises OSError.

    It is inherited by every process forked from here on and can never be removed
    (Documentation/userspace-api/seccomp_filter.rst).
    """
    program = _FilterProgram(len(instructions) // 8, instructions)
    done = _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0)
    _check(done, "seccomp filter")
