"""The filter's instructions, interpreted as the kernel does, for every call on each machine."""

import errno
import re
import struct
from pathlib import Path

import pytest

from rollyard_sandbox.guest import calls
from rollyard_sandbox.guest import filter as system_calls

HIDDEN = set(system_calls._HIDDEN)  # pyright: ignore[reportPrivateUsage]
REFUSED = set(system_calls._REFUSED)  # pyright: ignore[reportPrivateUsage]
BY_ARGUMENT = {
    "clone", "socket", "mknod", "mknodat", "personality", "prctl", "ioctl", "fcntl", "madvise",
}  # fmt: skip
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM, RISCV64 = 0x40000003, 0x40000028, 0xC00000F3
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = (ERRNO | e for e in (errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT))
PROGRAMS = {
    machine: list(struct.iter_unpack("=HBBI", system_calls.program(machine))) for machine in AUDIT
}
NUMBERS = {"x86_64": calls.X86_64, "aarch64": calls.AARCH64}
CALLS = range(1024)
MAX_INSTRUCTIONS = 4096
# What ordinary programs need, by the kernel's own tables; 0: there is no such call.
NEEDED = {
    "x86_64": {
        "read": 0, "write": 1, "open": 2, "mmap": 9, "mprotect": 10, "brk": 12, "fork": 57,
        "vfork": 58, "execve": 59, "wait4": 61, "kill": 62, "flock": 73, "futex": 202,
        "epoll_create1": 291, "eventfd2": 290, "pipe2": 293, "getrandom": 318,
        "memfd_create": 319, "statx": 332, "close_range": 436, "openat": 257, "socketpair": 53,
        "madvise": 28, "sched_setaffinity": 203, "timerfd_create": 283, "rt_sigaction": 13,
    },
    "aarch64": {
        "getcwd": 17, "eventfd2": 19, "epoll_create1": 20, "dup3": 24, "flock": 32, "openat": 56,
        "pipe2": 59, "getdents64": 61, "read": 63, "write": 64, "ppoll": 73, "newfstatat": 79,
        "timerfd_create": 85, "exit_group": 94, "futex": 98, "nanosleep": 101, "kill": 129,
        "sched_setaffinity": 122, "rt_sigaction": 134, "getpid": 172, "socketpair": 199,
        "brk": 214, "munmap": 215, "execve": 221, "mmap": 222, "mprotect": 226, "madvise": 233,
        "wait4": 260, "getrandom": 278, "memfd_create": 279, "statx": 291, "close_range": 436,
    },
}  # fmt: skip

machines = pytest.mark.parametrize("machine", AUDIT)


def verdict(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """Run the program over one call (Documentation/userspace-api/seccomp_filter.rst)."""
    program = PROGRAMS[machine]
    arch = AUDIT[machine] if arch is None else arch
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, arch, 0, *padded)
    at = accumulator = 0
    while True:
        code, on_true, on_false, value = program[at]
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


def _call(machine: str, name: str, *arguments: int) -> int:
    return verdict(machine, NUMBERS[machine][name], *arguments)


@machines
def test_it_fits_into_the_kernels_bound_and_every_jump_stays_inside(machine: str) -> None:
    program = PROGRAMS[machine]
    assert len(program) <= MAX_INSTRUCTIONS
    for at, (code, on_true, on_false, value) in enumerate(program):
        if code in (0x15, 0x35, 0x45):
            assert at + 1 + max(on_true, on_false) < len(program)
        elif code == 0x05:
            assert at + 1 + value < len(program)
    assert program[-1][0] == 0x06  # it cannot run off its end


@machines
def test_every_call_gets_the_verdict_of_its_list(machine: str) -> None:
    assert not HIDDEN & REFUSED and not (HIDDEN | REFUSED) & BY_ARGUMENT
    names = {number: name for name, number in NUMBERS[machine].items()}
    assert len(names) == len(NUMBERS[machine]), "two names for one number"
    assert set(names.values()) <= HIDDEN | REFUSED | BY_ARGUMENT
    for number in CALLS:
        name = names.get(number)
        if name not in BY_ARGUMENT:
            wanted = ENOSYS if name in HIDDEN else EPERM if name in REFUSED else ALLOW
            assert verdict(machine, number) == wanted, (number, name)


def test_every_call_with_a_rule_has_its_number_on_both_architectures() -> None:
    assert calls.X86_64.keys() == HIDDEN | REFUSED | BY_ARGUMENT
    # What the newer architecture never had; asm-generic/unistd.h has no such names.
    assert calls.X86_64.keys() - calls.AARCH64.keys() == {
        "inotify_init", "create_module", "get_kernel_syms", "query_module", "iopl", "ioperm",
        "sysfs", "ustat", "uselib", "_sysctl", "modify_ldt", "mknod",
    }  # fmt: skip
    assert calls.AARCH64.keys() < calls.X86_64.keys()


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "asm-generic/unistd.h"),
    ],
)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str, header: str) -> None:
    """Of Debian's linux-libc-dev, which g++ brings; it may be older than the newest calls."""
    text = (Path("/usr/include") / header).read_text()
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)
    kernels = {name: int(number) for name, number in defined if name != "syscalls"}
    known = NUMBERS[machine].keys() & kernels.keys()
    assert len(known) >= 90
    assert {name: NUMBERS[machine][name] for name in known} == {n: kernels[n] for n in known}
    missing = NUMBERS[machine].keys() - kernels.keys()
    assert all(NUMBERS[machine][name] > max(kernels.values()) for name in missing), missing
    for name, number in NEEDED[machine].items():
        assert kernels.get(name, number) == number


@machines
@pytest.mark.parametrize("arch", [I386, ARM, RISCV64, 0])
def test_a_foreign_architecture_kills(machine: str, arch: int) -> None:
    assert {verdict(machine, number, arch=arch) for number in CALLS} == {KILL_PROCESS}


@machines
def test_the_other_architectures_calls_kill(machine: str) -> None:
    (other,) = AUDIT.keys() - {machine}
    assert {verdict(machine, n, arch=AUDIT[other]) for n in CALLS} == {KILL_PROCESS}


@machines
def test_x32_numbers_kill(machine: str) -> None:
    assert {verdict(machine, 0x40000000 | number) for number in CALLS} == {KILL_PROCESS}
    assert verdict(machine, -1) == KILL_PROCESS


@machines
def test_what_ordinary_programs_need_is_allowed(machine: str) -> None:
    for name, number in NEEDED[machine].items():
        assert verdict(machine, number) == ALLOW, name


@machines
def test_clone_makes_threads_and_processes_but_no_namespace(machine: str) -> None:
    for flags in (17, 0x3D0F00, 0x1200011, 0x01200011, 0x4111):
        assert _call(machine, "clone", flags) == ALLOW, hex(flags)
    for bit in (17, 25, 26, 27, 28, 29, 30):  # NS, CGROUP, UTS, IPC, USER, PID, NET
        assert _call(machine, "clone", 1 << bit | 17) == EPERM, bit


@machines
def test_sockets_are_unix_or_lead_nowhere(machine: str) -> None:
    for family in range(64):
        wanted = ALLOW if family in (1, 2, 10) else EAFNOSUPPORT
        assert _call(machine, "socket", family, 1, 0) == wanted
        # The kernel looks at 32 bits; so does the filter.
        assert _call(machine, "socket", family | 1 << 40, 1, 0) == wanted


@pytest.mark.parametrize(
    ("machine", "name"), [("x86_64", "mknod"), ("x86_64", "mknodat"), ("aarch64", "mknodat")]
)
def test_pipes_and_files_may_be_made_but_no_device(machine: str, name: str) -> None:
    before = (0, 0) if name == "mknodat" else (0,)
    for kind, wanted in ((0o010000, ALLOW), (0o100000, ALLOW), (0o140000, ALLOW), (0, ALLOW),
                         (0o020000, EPERM), (0o060000, EPERM)):  # fmt: skip
        assert _call(machine, name, *before, kind | 0o666, 0) == wanted, oct(kind)


@machines
def test_personality_may_be_asked_for_and_not_changed(machine: str) -> None:
    for value in (0, 0xFFFFFFFF):
        assert _call(machine, "personality", value) == ALLOW
    for value in (0x0040000, 8):
        assert _call(machine, "personality", value) == EPERM


@machines
def test_prctl_ioctl_and_fcntl_refuse_what_changes_or_watches_others(machine: str) -> None:
    for option in (22, 26, 35, 67, 0x59616D61):
        assert _call(machine, "prctl", option) == EPERM
    for option in (1, 3, 4, 15, 38):
        assert _call(machine, "prctl", option) == ALLOW
    for request, wanted in ((0x5412, EPERM), (0x541C, EPERM), (0x5401, ALLOW), (0x5413, ALLOW)):
        assert _call(machine, "ioctl", 0, request) == wanted
    # Leases and notices of a directory; locks, flags and pipe sizes stay.
    for command in range(2048):
        wanted = EPERM if command in (1024, 1026) else ALLOW
        assert _call(machine, "fcntl", 0, command) == wanted


@machines
def test_pages_are_neither_collapsed_nor_merged(machine: str) -> None:
    for advice in range(128):
        wanted = EPERM if advice in (12, 25) else ALLOW
        assert _call(machine, "madvise", 0, 0, advice) == wanted
