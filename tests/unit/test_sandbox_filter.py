"""The filter's instructions, interpreted as the kernel does, for every call there is."""

import errno
import struct
from collections.abc import Iterable

import pytest

from rollyard_sandbox.guest import filter as system_calls

HIDDEN = system_calls._HIDDEN  # pyright: ignore[reportPrivateUsage]
REFUSED = system_calls._REFUSED  # pyright: ignore[reportPrivateUsage]
X86_64, I386, AARCH64 = 0xC000003E, 0x40000003, 0xC00000B7
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = (ERRNO | e for e in (errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT))
PROGRAM = list(struct.iter_unpack("=HBBI", system_calls.program()))
CALLS = range(1024)
CLONE, SOCKET, MKNOD, MKNODAT, PERSONALITY, PRCTL, IOCTL = 56, 41, 133, 259, 135, 157, 16
BY_ARGUMENT = {CLONE, SOCKET, MKNOD, MKNODAT, PERSONALITY, PRCTL, IOCTL}
MAX_INSTRUCTIONS = 4096


def verdict(number: int, *arguments: int, arch: int = X86_64) -> int:
    """Run the program over one call (Documentation/userspace-api/seccomp_filter.rst)."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, arch, 0, *padded)
    at = accumulator = 0
    while True:
        code, on_true, on_false, value = PROGRAM[at]
        at += 1
        match code:
            case 0x20:  # load a word
                accumulator = struct.unpack_from("=I", data, value)[0]
            case 0x54:  # and
                accumulator &= value
            case 0x05:  # jump
                at += value
            case 0x15:
                at += on_true if accumulator == value else on_false
            case 0x35:
                at += on_true if accumulator >= value else on_false
            case 0x45:
                at += on_true if accumulator & value else on_false
            case 0x06:
                return value
            case _:
                raise AssertionError(f"instruction {code:#x}")


def _numbers(calls: dict[str, int]) -> Iterable[int]:
    return calls.values()


def test_it_fits_into_the_kernels_bound_and_every_jump_stays_inside() -> None:
    assert len(PROGRAM) <= MAX_INSTRUCTIONS
    for at, (code, on_true, on_false, value) in enumerate(PROGRAM):
        if code in (0x15, 0x35, 0x45):
            assert at + 1 + max(on_true, on_false) < len(PROGRAM)
        elif code == 0x05:
            assert at + 1 + value < len(PROGRAM)
    assert PROGRAM[-1][0] == 0x06  # it cannot run off its end


def test_every_call_gets_the_verdict_of_its_list() -> None:
    hidden, refused = set(_numbers(HIDDEN)), set(_numbers(REFUSED))
    assert not hidden & refused and not (hidden | refused) & BY_ARGUMENT
    for number in CALLS:
        if number not in BY_ARGUMENT:
            wanted = ENOSYS if number in hidden else EPERM if number in refused else ALLOW
            assert verdict(number) == wanted, number


@pytest.mark.parametrize("arch", [I386, AARCH64, 0])
def test_a_foreign_architecture_kills(arch: int) -> None:
    assert {verdict(number, arch=arch) for number in CALLS} == {KILL_PROCESS}


def test_x32_numbers_kill() -> None:
    assert {verdict(0x40000000 | number) for number in CALLS} == {KILL_PROCESS}
    assert verdict(-1) == KILL_PROCESS


def test_what_ordinary_programs_need_is_allowed() -> None:
    needed = {
        "read": 0, "write": 1, "open": 2, "mmap": 9, "mprotect": 10, "brk": 12, "clone": 56,
        "fork": 57, "vfork": 58, "execve": 59, "wait4": 61, "kill": 62, "fcntl": 72, "flock": 73,
        "futex": 202, "epoll_create1": 291, "eventfd2": 290, "pipe2": 293, "getrandom": 318,
        "memfd_create": 319, "statx": 332, "close_range": 436, "openat": 257, "socketpair": 53,
        "madvise": 28, "sched_setaffinity": 203, "timerfd_create": 283,
    }  # fmt: skip
    assert {name: verdict(number) for name, number in needed.items()} == dict.fromkeys(
        needed, ALLOW
    )


def test_clone_makes_threads_and_processes_but_no_namespace() -> None:
    for flags in (17, 0x3D0F00, 0x1200011, 0x01200011, 0x4111):
        assert verdict(CLONE, flags) == ALLOW, hex(flags)
    for bit in (17, 25, 26, 27, 28, 29, 30):  # NS, CGROUP, UTS, IPC, USER, PID, NET
        assert verdict(CLONE, 1 << bit | 17) == EPERM, bit


def test_sockets_are_unix_or_lead_nowhere() -> None:
    for family in range(64):
        wanted = ALLOW if family in (1, 2, 10) else EAFNOSUPPORT
        assert verdict(SOCKET, family, 1, 0) == wanted
        # The kernel looks at 32 bits; so does the filter.
        assert verdict(SOCKET, family | 1 << 40, 1, 0) == wanted


@pytest.mark.parametrize("place", [0, 1], ids=["mknod", "mknodat"])
def test_pipes_and_files_may_be_made_but_no_device(place: int) -> None:
    number, before = ((MKNOD, (0,)), (MKNODAT, (0, 0)))[place]
    for kind, wanted in ((0o010000, ALLOW), (0o100000, ALLOW), (0o140000, ALLOW), (0, ALLOW),
                         (0o020000, EPERM), (0o060000, EPERM)):  # fmt: skip
        assert verdict(number, *before, kind | 0o666, 0) == wanted, oct(kind)


def test_personality_may_be_asked_for_and_not_changed() -> None:
    assert verdict(PERSONALITY, 0) == verdict(PERSONALITY, 0xFFFFFFFF) == ALLOW
    assert verdict(PERSONALITY, 0x0040000) == verdict(PERSONALITY, 8) == EPERM


def test_prctl_and_ioctl_refuse_what_changes_others_or_the_filter() -> None:
    for option in (26, 35, 0x59616D61):
        assert verdict(PRCTL, option) == EPERM
    for option in (1, 3, 4, 15, 38):
        assert verdict(PRCTL, option) == ALLOW
    assert verdict(IOCTL, 0, 0x5412) == verdict(IOCTL, 0, 0x541C) == EPERM
    assert verdict(IOCTL, 0, 0x5401) == verdict(IOCTL, 0, 0x5413) == ALLOW
