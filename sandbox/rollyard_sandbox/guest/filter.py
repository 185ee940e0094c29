"""The system-call filter of a slot: its PID 1 and every program in it.

Protects against: kernel interfaces that a program has no business with (new namespaces, mounts,
tracing, key rings, bpf, io_uring, …), even if another wall should fail.
Does not protect against: bugs in the calls that stay allowed. Default is allow: model code loads
arbitrary wheels, and an allow-list fails at random.

A denied call answers with an errno, so that a program sees an ordinary refusal; only a foreign
calling convention (32-bit, x32) kills. Numbers are in calls.py.
"""

import errno
import platform
import struct
from typing import NamedTuple

from . import calls

_X32_BIT = 0x40000000

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

# Offsets in struct seccomp_data.
_NR, _ARCH, _ARGS = 0, 4, 16

_LD, _JEQ, _JGE, _AND, _RET = 0x20, 0x15, 0x35, 0x54, 0x06
_JSET = 0x45

_HIDDEN = (  # ENOSYS: programs fall back as on a kernel without it
    "clone3",  # its flags are in memory, out of a filter's sight; libc falls back to clone
    "io_uring_setup", "io_uring_enter", "io_uring_register",
    "keyctl", "add_key", "request_key",  # key rings outlive a run
    "userfaultfd", "bpf", "perf_event_open",
    "fsopen", "fsconfig", "fsmount", "fspick", "open_tree", "move_mount", "mount_setattr",
    "open_tree_attr", "statmount", "listmount", "pidfd_getfd", "process_madvise",
    "process_mrelease", "fanotify_init", "fanotify_mark", "memfd_secret",
    "cachestat",  # which pages of the image others have read
    # Per-user and system-wide pools that one program could empty for the whole host.
    "inotify_init", "inotify_init1", "inotify_add_watch", "inotify_rm_watch",
    "io_setup", "io_destroy", "io_getevents", "io_submit", "io_cancel", "io_pgetevents",
    "seccomp",  # stacked filters are kernel memory that no control group counts
    # System V IPC and message queues would survive in the slot's IPC namespace between runs.
    "shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semctl", "semtimedop", "msgget",
    "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive",
    "mq_notify", "mq_getsetattr",
)  # fmt: skip

_REFUSED = (  # EPERM
    "unshare", "setns", "mount", "umount2", "pivot_root", "chroot",
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp",
    "open_by_handle_at", "name_to_handle_at",
    "quotactl", "quotactl_fd", "acct", "swapon", "swapoff", "reboot", "kexec_load",
    "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module",
    "get_kernel_syms", "query_module", "iopl", "ioperm", "settimeofday", "clock_settime",
    "clock_adjtime", "adjtimex", "syslog", "lookup_dcookie", "nfsservctl", "vhangup",
    "move_pages", "mbind", "migrate_pages", "set_mempolicy", "set_mempolicy_home_node",
    "sethostname", "setdomainname", "sysfs", "ustat", "uselib", "_sysctl", "modify_ldt",
)  # fmt: skip

_CLONE_NEW_ANY = 0x7E020000  # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; the latter two reach nothing
_S_IFMT, _S_IFCHR, _S_IFBLK = 0o170000, 0o020000, 0o060000
_PR_SET_SECCOMP, _PR_SET_TSC, _PR_SET_MM, _PR_SET_PTRACER = 22, 26, 35, 0x59616D61
# Where the machine merges equal pages, a slow write tells that another process has the same.
_MADV_MERGEABLE, _PR_SET_MEMORY_MERGE = 12, 67
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# Both tell a program what others do with the image's files: leases are broken by an open, and a
# directory notifies whoever asked of each access below it.
_F_SETLEASE, _F_NOTIFY = 1024, 1026
# Makes huge pages of a file's pages: of those that all forks of a template share, and at the
# expense of the slot that asks, for good.
_MADV_COLLAPSE = 25


class Architecture(NamedTuple):
    """What differs: the kernel's name for it (AUDIT_ARCH_*), and its numbers."""

    audit: int
    calls: dict[str, int]


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, calls.X86_64),
    "aarch64": Architecture(0xC00000B7, calls.AARCH64),
}
"""By platform.machine(); everything here is little-endian."""


def _op(code: int, value: int, on_true: int = 0, on_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, on_true, on_false, value)


def _deny(number: int) -> bytes:
    return _op(_RET, _ERRNO | number)


_PASS = _op(_RET, _ALLOW)


def _load_argument(index: int) -> bytes:
    return _op(_LD, _ARGS + 8 * index)  # low half: little-endian


def _refuse(index: int, *values: int) -> bytes:
    """EPERM where an argument has one of these values."""
    count = len(values)
    tests = (_op(_JEQ, one, count - i, 0) for i, one in enumerate(values[:-1], 1))
    last = _op(_JEQ, values[-1], 0, 1)
    return _load_argument(index) + b"".join(tests) + last + _deny(errno.EPERM) + _PASS


def _no_device(index: int) -> bytes:
    return (
        _load_argument(index)
        + _op(_AND, _S_IFMT)
        + _op(_JEQ, _S_IFCHR, 1, 0)
        + _op(_JEQ, _S_IFBLK, 0, 1)
        + _deny(errno.EPERM)
        + _PASS
    )


def _argument_rules() -> dict[str, bytes]:
    """Calls whose arguments decide, each a small program that returns."""
    return {
        "clone": _load_argument(0) + _op(_JSET, _CLONE_NEW_ANY, 0, 1) + _deny(errno.EPERM) + _PASS,
        "socket": _load_argument(0)
        + b"".join(_op(_JEQ, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES))
        + _deny(errno.EAFNOSUPPORT)
        + _PASS,
        "mknod": _no_device(1),
        "mknodat": _no_device(2),
        "personality": _load_argument(0)
        + _op(_JEQ, 0, 2, 0)
        + _op(_JEQ, 0xFFFFFFFF, 1, 0)
        + _deny(errno.EPERM)
        + _PASS,
        "prctl": _refuse(
            0, _PR_SET_SECCOMP, _PR_SET_TSC, _PR_SET_MM, _PR_SET_PTRACER, _PR_SET_MEMORY_MERGE
        ),
        "ioctl": _refuse(1, _TIOCSTI, _TIOCLINUX),
        "fcntl": _refuse(1, _F_SETLEASE, _F_NOTIFY),
        "madvise": _refuse(2, _MADV_MERGEABLE, _MADV_COLLAPSE),
    }


def _rules(numbers: dict[str, int]) -> dict[int, bytes]:
    rules: dict[str, bytes] = dict.fromkeys(_HIDDEN, _deny(errno.ENOSYS))
    rules.update(dict.fromkeys(_REFUSED, _deny(errno.EPERM)))
    rules.update(_argument_rules())
    return {numbers[name]: rule for name, rule in rules.items() if name in numbers}


def _tree(numbers: list[int], rules: dict[int, bytes]) -> bytes:
    """Binary search: the kernel runs the program once for every call number at installation."""
    if len(numbers) == 1:
        rule = rules[numbers[0]]
        return _op(_JEQ, numbers[0], 0, len(rule) // 8) + rule + _PASS
    middle = len(numbers) // 2
    below, above = _tree(numbers[:middle], rules), _tree(numbers[middle:], rules)
    skip = len(below) // 8
    if skip > 255:  # a conditional jump reaches 255 instructions, an unconditional one any
        return _op(_JGE, numbers[middle], 0, 1) + _op(0x05, skip) + below + above
    return _op(_JGE, numbers[middle], skip, 0) + below + above


def supported() -> bool:
    """True where the numbers of this machine's calls are known."""
    return platform.machine() in ARCHITECTURES


def program(machine: str | None = None) -> bytes:
    """The filter as BPF instructions of 8 bytes each, for platform.machine() by default."""
    architecture = ARCHITECTURES[machine or platform.machine()]
    rules = _rules(architecture.calls)
    head = (
        _op(_LD, _ARCH)
        + _op(_JEQ, architecture.audit, 1, 0)
        + _op(_RET, _KILL_PROCESS)
        + _op(_LD, _NR)
        # x32's numbers; no other architecture has calls there, so that -1 gets no further either.
        + _op(_JGE, _X32_BIT, 0, 1)
        + _op(_RET, _KILL_PROCESS)
    )
    return head + _tree(sorted(rules), rules)
