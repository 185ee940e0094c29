"""The system-call filter of a slot: its PID 1 and every program in it.

Protects against: kernel interfaces that a program has no business with (new namespaces, mounts,
tracing, key rings, bpf, io_uring, …), even if another wall should fail.
Does not protect against: bugs in the calls that stay allowed. Default is allow: model code loads
arbitrary wheels, and an allow-list fails at random.

A denied call answers with an errno, so that a program sees an ordinary refusal; only a foreign
calling convention (32-bit, x32) kills.
"""

import errno
import platform
import struct

ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

# Offsets in struct seccomp_data.
_NR, _ARCH, _ARGS = 0, 4, 16

_LD, _JEQ, _JGE, _AND, _RET = 0x20, 0x15, 0x35, 0x54, 0x06
_JSET = 0x45

_HIDDEN = {  # ENOSYS: programs fall back as on a kernel without it
    "clone3": 435,  # its flags are in memory, out of a filter's sight; libc falls back to clone
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "keyctl": 250, "add_key": 248, "request_key": 249,  # key rings outlive a run
    "userfaultfd": 323, "bpf": 321, "perf_event_open": 298,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "open_tree": 428,
    "move_mount": 429, "mount_setattr": 442, "open_tree_attr": 467, "statmount": 457,
    "listmount": 458, "pidfd_getfd": 438, "process_madvise": 440, "process_mrelease": 448,
    "fanotify_init": 300, "fanotify_mark": 301, "memfd_secret": 447,
    # Per-user and system-wide pools that one program could empty for the whole host.
    "inotify_init": 253, "inotify_init1": 294, "inotify_add_watch": 254, "inotify_rm_watch": 255,
    "io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209, "io_cancel": 210,
    "io_pgetevents": 333,
    "seccomp": 317,  # stacked filters are kernel memory that no control group counts
    # System V IPC and message queues would survive in the slot's IPC namespace between runs.
    "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65,
    "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71,
    "mq_open": 240, "mq_unlink": 241, "mq_timedsend": 242, "mq_timedreceive": 243,
    "mq_notify": 244, "mq_getsetattr": 245,
}  # fmt: skip

_REFUSED = {  # EPERM
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "open_by_handle_at": 304, "name_to_handle_at": 303,
    "quotactl": 179, "quotactl_fd": 443, "acct": 163, "swapon": 167, "swapoff": 168,
    "reboot": 169, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "create_module": 174, "get_kernel_syms": 177,
    "query_module": 178, "iopl": 172, "ioperm": 173, "settimeofday": 164, "clock_settime": 227,
    "clock_adjtime": 305, "adjtimex": 159, "syslog": 103, "lookup_dcookie": 212, "nfsservctl": 180,
    "vhangup": 153, "move_pages": 279, "mbind": 237, "migrate_pages": 256, "set_mempolicy": 238,
    "set_mempolicy_home_node": 450, "sethostname": 170, "setdomainname": 171, "sysfs": 139,
    "ustat": 136, "uselib": 134, "_sysctl": 156, "modify_ldt": 154,
}  # fmt: skip

_CLONE, _SOCKET, _MKNOD, _MKNODAT, _PERSONALITY, _PRCTL, _IOCTL = 56, 41, 133, 259, 135, 157, 16
_CLONE_NEW_ANY = 0x7E020000  # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; the latter two reach nothing
_S_IFMT, _S_IFCHR, _S_IFBLK = 0o170000, 0o020000, 0o060000
_PR_SET_SECCOMP, _PR_SET_TSC, _PR_SET_MM, _PR_SET_PTRACER = 22, 26, 35, 0x59616D61
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


def _op(code: int, value: int, on_true: int = 0, on_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, on_true, on_false, value)


def _deny(number: int) -> bytes:
    return _op(_RET, _ERRNO | number)


_PASS = _op(_RET, _ALLOW)


def _load_argument(index: int) -> bytes:
    return _op(_LD, _ARGS + 8 * index)  # low half: little-endian


def _argument_rules() -> dict[int, bytes]:
    """Calls whose arguments decide, each a small program that returns."""
    no_device = (
        _op(_AND, _S_IFMT)
        + _op(_JEQ, _S_IFCHR, 1, 0)
        + _op(_JEQ, _S_IFBLK, 0, 1)
        + _deny(errno.EPERM)
        + _PASS
    )
    return {
        _CLONE: _load_argument(0) + _op(_JSET, _CLONE_NEW_ANY, 0, 1) + _deny(errno.EPERM) + _PASS,
        _SOCKET: _load_argument(0)
        + b"".join(_op(_JEQ, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES))
        + _deny(errno.EAFNOSUPPORT)
        + _PASS,
        _MKNOD: _load_argument(1) + no_device,
        _MKNODAT: _load_argument(2) + no_device,
        _PERSONALITY: _load_argument(0)
        + _op(_JEQ, 0, 2, 0)
        + _op(_JEQ, 0xFFFFFFFF, 1, 0)
        + _deny(errno.EPERM)
        + _PASS,
        _PRCTL: _load_argument(0)
        + _op(_JEQ, _PR_SET_SECCOMP, 3, 0)
        + _op(_JEQ, _PR_SET_TSC, 2, 0)
        + _op(_JEQ, _PR_SET_MM, 1, 0)
        + _op(_JEQ, _PR_SET_PTRACER, 0, 1)
        + _deny(errno.EPERM)
        + _PASS,
        _IOCTL: _load_argument(1)
        + _op(_JEQ, _TIOCSTI, 1, 0)
        + _op(_JEQ, _TIOCLINUX, 0, 1)
        + _deny(errno.EPERM)
        + _PASS,
    }


def _rules() -> dict[int, bytes]:
    rules = {number: _deny(errno.ENOSYS) for number in _HIDDEN.values()}
    rules.update({number: _deny(errno.EPERM) for number in _REFUSED.values()})
    rules.update(_argument_rules())
    return rules


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
    """True where the call numbers above are this machine's."""
    return platform.machine() == "x86_64"


def program() -> bytes:
    """The filter as BPF instructions of 8 bytes each."""
    rules = _rules()
    head = (
        _op(_LD, _ARCH)
        + _op(_JEQ, ARCH_X86_64, 1, 0)
        + _op(_RET, _KILL_PROCESS)
        + _op(_LD, _NR)
        + _op(_JGE, _X32_BIT, 0, 1)
        + _op(_RET, _KILL_PROCESS)
    )
    return head + _tree(sorted(rules), rules)
