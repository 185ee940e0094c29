"""Numbers of system calls, by architecture: those that the filter has a rule for.

Sources: arch/x86/entry/syscalls/syscall_64.tbl, and include/uapi/asm-generic/unistd.h, which
aarch64 uses. A call that an architecture never had (iopl, ustat, …) is in the other's table only.
"""

_EVERYWHERE = {  # from 424 on, all architectures have the same numbers
    "clone3": 435, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "open_tree": 428,
    "move_mount": 429, "mount_setattr": 442, "open_tree_attr": 467, "statmount": 457,
    "listmount": 458, "pidfd_getfd": 438, "process_madvise": 440, "process_mrelease": 448,
    "memfd_secret": 447, "quotactl_fd": 443, "set_mempolicy_home_node": 450, "cachestat": 451,
}  # fmt: skip

X86_64 = {
    "keyctl": 250, "add_key": 248, "request_key": 249, "userfaultfd": 323, "bpf": 321,
    "perf_event_open": 298, "fanotify_init": 300, "fanotify_mark": 301, "inotify_init": 253,
    "inotify_init1": 294, "inotify_add_watch": 254, "inotify_rm_watch": 255, "io_setup": 206,
    "io_destroy": 207, "io_getevents": 208, "io_submit": 209, "io_cancel": 210,
    "io_pgetevents": 333, "seccomp": 317, "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67,
    "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69,
    "msgrcv": 70, "msgctl": 71, "mq_open": 240, "mq_unlink": 241, "mq_timedsend": 242,
    "mq_timedreceive": 243, "mq_notify": 244, "mq_getsetattr": 245, "unshare": 272, "setns": 308,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "ptrace": 101,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "open_by_handle_at": 304,
    "name_to_handle_at": 303, "quotactl": 179, "acct": 163, "swapon": 167, "swapoff": 168,
    "reboot": 169, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "create_module": 174, "get_kernel_syms": 177,
    "query_module": 178, "iopl": 172, "ioperm": 173, "settimeofday": 164, "clock_settime": 227,
    "clock_adjtime": 305, "adjtimex": 159, "syslog": 103, "lookup_dcookie": 212, "nfsservctl": 180,
    "vhangup": 153, "move_pages": 279, "mbind": 237, "migrate_pages": 256, "set_mempolicy": 238,
    "sethostname": 170, "setdomainname": 171, "sysfs": 139, "ustat": 136, "uselib": 134,
    "_sysctl": 156, "modify_ldt": 154, "clone": 56, "socket": 41, "mknod": 133, "mknodat": 259,
    "personality": 135, "prctl": 157, "ioctl": 16, "fcntl": 72,
    "madvise": 28,
    **_EVERYWHERE,
}  # fmt: skip

AARCH64 = {
    "keyctl": 219, "add_key": 217, "request_key": 218, "userfaultfd": 282, "bpf": 280,
    "perf_event_open": 241, "fanotify_init": 262, "fanotify_mark": 263, "inotify_init1": 26,
    "inotify_add_watch": 27, "inotify_rm_watch": 28, "io_setup": 0, "io_destroy": 1,
    "io_getevents": 4, "io_submit": 2, "io_cancel": 3, "io_pgetevents": 292, "seccomp": 277,
    "shmget": 194, "shmat": 196, "shmctl": 195, "shmdt": 197, "semget": 190, "semop": 193,
    "semctl": 191, "semtimedop": 192, "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187,
    "mq_open": 180, "mq_unlink": 181, "mq_timedsend": 182, "mq_timedreceive": 183, "mq_notify": 184,
    "mq_getsetattr": 185, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
    "chroot": 51, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "open_by_handle_at": 265, "name_to_handle_at": 264, "quotactl": 60, "acct": 89, "swapon": 224,
    "swapoff": 225, "reboot": 142, "kexec_load": 104, "kexec_file_load": 294, "init_module": 105,
    "finit_module": 273, "delete_module": 106, "settimeofday": 170, "clock_settime": 112,
    "clock_adjtime": 266, "adjtimex": 171, "syslog": 116, "lookup_dcookie": 18, "nfsservctl": 42,
    "vhangup": 58, "move_pages": 239, "mbind": 235, "migrate_pages": 238, "set_mempolicy": 237,
    "sethostname": 161, "setdomainname": 162, "clone": 220, "socket": 198, "mknodat": 33,
    "personality": 92, "prctl": 167, "ioctl": 29, "fcntl": 25,
    "madvise": 233,
    **_EVERYWHERE,
}  # fmt: skip
