"""Ways out of the sandbox, as small programs, each with the question that it answers.

A program gathers in ``through`` what it managed although it should not. Numbers of system calls
are x86-64's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rollyard_sandbox.reports import SlotReport

PRELUDE = r"""
import ctypes, errno, json, mmap, os, resource, signal, socket, stat, sys, time
libc = ctypes.CDLL(None, use_errno=True)
through = []
def call(number, *arguments):
    ctypes.set_errno(0)
    whole = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return libc.syscall(ctypes.c_long(number), *whole), ctypes.get_errno()
def refused(**calls):
    # An error of the call itself would mean that the filter let it reach the kernel.
    for name, arguments in calls.items():
        result, error = call(*arguments)
        if result == 0 and name.startswith("clone"):
            os._exit(0)  # the child that must not exist
        if error not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            through.append(f"{name}: {errno.errorcode.get(error, 'done')}")
def fails(name, action, *arguments):
    try:
        action(*arguments)
    except (OSError, ValueError):
        return
    through.append(name)
def write(path, text):
    file = os.open(path, os.O_WRONLY)  # unbuffered: an error of the write itself is seen
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
def absent(*paths):
    through.extend(path for path in paths if os.path.lexists(path))
"""
_ANSWER = "\nprint(json.dumps(through))\n"

Held = Callable[[SlotReport], str]
"""What got through, by the report made outside the program; "" when the wall held."""


@dataclass(frozen=True)
class Attempt:
    """One attempt; ``before`` is a program that runs in the same slot first.

    ``@SECRET@`` in ``before``, and its standard input, is a text made for this one attempt;
    ``@PATTERN@`` in ``program`` is a regular expression that matches it, but not itself.
    """

    name: str
    question: str
    program: str
    held: Held
    before: str = ""

    def code(self, pattern: str) -> str:
        return PRELUDE + self.program.replace("@PATTERN@", pattern) + _ANSWER

    def first(self, secret: str) -> str:
        return PRELUDE + self.before.replace("@SECRET@", secret)


def nothing_through(report: SlotReport) -> str:
    """The program came to its end and had got nothing."""
    if report.exit_code != 0:
        return f"the attempt itself failed: {report.stderr[-300:] or report}"
    try:
        got = msgspec.json.decode(report.stdout, type=list[str])
    except msgspec.DecodeError:
        return f"no answer: {report.stdout[-300:]!r}"
    return ", ".join(got)


def killed_at_once(report: SlotReport) -> str:
    """The kernel ended it at the forbidden instruction: SIGSYS by the filter, or SIGSEGV where
    the kernel has no such entry at all."""
    if report.signal in (31, 11) and not report.stdout:
        return ""
    return f"went on: exit code {report.exit_code}, signal {report.signal}, {report.stdout[:100]}"


def told_truly(report: SlotReport) -> str:
    """Exit code 3 is reported, with the forged text as mere output."""
    if (report.exit_code, report.signal, report.killed) == (3, None, None):
        return ""
    return f"reported as exit code {report.exit_code}, signal {report.signal}, {report.killed}"


def no_core(report: SlotReport) -> str:
    """It crashed, and the crash left nothing behind."""
    if report.signal != 11:
        return f"it did not crash: {report.stdout or report.stderr[-200:]}"
    return ", ".join(report.files)


ATTEMPTS = (
    Attempt("namespaces", "Can it make or enter a namespace, and be root there?", r"""
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000):
    refused(**{f"unshare_{flag:x}": (272, flag), f"clone_{flag:x}": (56, flag | 17, 0, 0, 0, 0)})
refused(unshare_time=(272, 0x80), setns=(308, 0, 0), clone3=(435, bytes(88), 88))
fails("uid_map", write, "/proc/self/uid_map", "0 0 1")
""", nothing_through),
    Attempt("mounts", "Can it mount, unmount or move a file system?", r"""
refused(mount=(165, b"none", b"/tmp", b"tmpfs", 0, 0), bind=(165, b"/", b"/tmp", 0, 4096, 0),
        umount=(166, b"/proc", 2), pivot_root=(155, b"/tmp", b"/tmp"), fsopen=(430, b"tmpfs", 0),
        fsmount=(432, 3, 0, 0), open_tree=(428, -100, b"/", 1), fspick=(433, -100, b"/", 0),
        attributes=(442, 0, b"/", 0, 0, 0), move=(429, -100, b"/tmp", -100, b"/box", 0))
""", nothing_through),
    Attempt("chroot", "Does any path lead above the root?", r"""
root = os.open("/", os.O_RDONLY)
fails("chroot", os.chroot, ".")
os.fchdir(root)
for up in ("..", "/..", "/proc/self/root/..", "/../../../..", "/proc/self/cwd/.."):
    if (os.stat(up).st_dev, os.stat(up).st_ino) != (os.fstat(root).st_dev, os.fstat(root).st_ino):
        through.append(up)
absent("/root", "/home", "/srv", "/run", "/mnt", "/boot", "/sys", "/etc/shadow", "/var/lib")
fails("root of PID 1", os.listdir, "/proc/1/root/")
""", nothing_through),
    Attempt("image", "Can it change a file of the image that all runs share?", r"""
looked = 0
for place, below, names in os.walk("/"):
    if place == "/":
        below[:] = [name for name in below if name not in ("proc", "box", "tmp")]
    if os.path.realpath(place).startswith(("/box", "/proc")) or looked > 3000:
        below.clear()
        continue
    looked += 1
    fails(f"file in {place}", os.open, os.path.join(place, "new"), os.O_CREAT | os.O_WRONLY)
    for name in names[:3]:
        path = os.path.join(place, name)
        if stat.S_ISREG(os.lstat(path).st_mode):
            fails(f"write {path}", os.open, path, os.O_WRONLY)
            fails(f"delete {path}", os.unlink, path)
            fails(f"chmod {path}", os.chmod, path, 0o777)
""", nothing_through),
    Attempt("tracing", "Can it trace a process, PID 1 among them?", r"""
child = os.fork()
if child == 0:
    time.sleep(30)
refused(attach=(101, 16, child, 0, 0), seize=(101, 0x4206, child, 0, 0), me=(101, 0, 0, 0, 0),
        one=(101, 0x4206, 1, 0, 0))
if libc.prctl(0x59616D61, -1, 0, 0, 0) == 0:
    through.append("PR_SET_PTRACER")
os.kill(child, 9)
""", nothing_through),
    Attempt("other memory", "Can it read or write another process's memory?", r"""
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
held = ctypes.create_string_buffer(8)
span = ctypes.byref(Span(ctypes.addressof(held), 8))
for pid in (1, os.getpid()):
    refused(process_vm_readv=(310, pid, span, 1, span, 1, 0),
            process_vm_writev=(311, pid, span, 1, span, 1, 0), kcmp=(312, pid, pid, 0, 0, 0))
for name in ("mem", "maps", "environ", "fd", "root", "cwd", "exe", "map_files", "task/1/mem"):
    path = f"/proc/1/{name}"
    fails(path, os.listdir if name in ("fd", "root", "cwd", "map_files") else open, path)
fails("write mem", open, "/proc/1/mem", "wb")
refused(pidfd_getfd=(438, 0, 0, 0), madvise=(440, 0, 0, 0, 0, 0), mrelease=(448, 0, 0))
""", nothing_through),
    Attempt("key rings", "Can it keep a key that outlives the run?", r"""
refused(add_key=(248, b"user", b"k", b"v", 1, -3), request_key=(249, b"user", b"k", 0, 0),
        keyctl=(250, 1, 0), keyctl_get=(250, 0, -4, 1))
absent("/proc/keys", "/proc/key-users")
""", nothing_through),
    Attempt("bpf", "Can it load a program into the kernel?",
            "refused(bpf=(321, 5, bytes(128), 128), map=(321, 0, bytes(128), 128))",
            nothing_through),
    Attempt("perf", "Can it watch the machine through performance counters?", r"""
refused(perf=(298, bytes(128), 0, -1, -1, 0))
""", nothing_through),
    Attempt("io_uring", "Can it reach the kernel past the filter, by io_uring?", r"""
refused(setup=(425, 4, bytes(256)), enter=(426, 0, 0, 0, 0, 0), register=(427, 0, 0, 0, 0))
""", nothing_through),
    Attempt("userfaultfd", "Can it halt the kernel in the middle of a copy?", r"""
refused(userfaultfd=(323, 1))
absent("/dev/userfaultfd", "/dev/fuse")
""", nothing_through),
    Attempt("handles", "Can it open files by handle, past the mount tree?", r"""
handle, mount = ctypes.create_string_buffer(136), ctypes.c_int()
handle[0:4] = (128).to_bytes(4, "little")
refused(name=(303, -100, b"/", handle, ctypes.byref(mount), 0), open=(304, -100, handle, 0))
""", nothing_through),
    Attempt("x32 calls", "Do calls of the x32 convention pass the filter?", r"""
call(0x40000000 + 39)
print("went on", flush=True)
""", killed_at_once),
    Attempt("32-bit calls", "Do calls of the 32-bit convention pass the filter?", r"""
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("53b814000000cd805bc3"))  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(ctypes.c_int)(start)()
print("went on", flush=True)
""", killed_at_once),
    Attempt("devices", "Can it make or open a device?", r"""
for kind, number in ((stat.S_IFCHR, os.makedev(1, 1)), (stat.S_IFBLK, os.makedev(8, 0))):
    for place in ("/tmp/node", "/box/work/node", "/dev/shm/node"):
        fails(f"mknod {place}", os.mknod, place, kind | 0o666, number)
known = {"null", "zero", "full", "random", "urandom", "shm", "fd", "stdin", "stdout", "stderr"}
through.extend(set(os.listdir("/dev")) - known)
for name in ("null", "zero", "full", "random", "urandom"):
    numbers = divmod(os.stat(f"/dev/{name}").st_rdev, 256)
    if numbers not in ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9)):
        through.append(name)
""", nothing_through),
    Attempt("kernel knobs", "Can it see or turn a setting of the kernel?", r"""
absent("/sys", "/proc/sys", "/proc/sysrq-trigger", "/proc/kcore", "/proc/kallsyms", "/proc/kmsg",
       "/proc/bus", "/proc/irq", "/proc/acpi", "/proc/scsi", "/proc/timer_list", "/proc/modules",
       "/proc/config.gz", "/proc/1/cgroup", "/proc/meminfo", "/proc/cmdline")
for name in ("attr/current", "setgroups", "gid_map", "projid_map"):
    fails(name, write, f"/proc/self/{name}", "0")
""", nothing_through),
    Attempt("kernel itself", "Can it load modules, reboot, swap, set clocks, read the log?", r"""
refused(init_module=(175, 0, 0, b""), finit_module=(313, 0, b"", 0), delete_module=(176, b"x", 0),
        kexec_load=(246, 0, 0, 0, 0), kexec_file=(320, 0, 0, 0, 0, 0), reboot=(169, 0, 0, 0, 0),
        swapon=(167, b"/tmp", 0), swapoff=(168, b"/tmp"), acct=(163, 0), syslog=(103, 10, 0, 0),
        clock_settime=(227, 0, bytes(16)), settimeofday=(164, bytes(16), 0),
        adjtimex=(159, bytes(208)), clock_adjtime=(305, 0, bytes(208)),
        quotactl=(179, 0, 0, 0, 0), sethostname=(170, b"x", 1),
        setdomainname=(171, b"x", 1), iopl=(172, 3), ioperm=(173, 0, 1, 1), ldt=(154, 0, 0, 0))
""", nothing_through),
    Attempt("set-user-id", "Can it gain rights by executing or by asking?", r"""
for place, below, names in os.walk("/"):
    if place == "/":
        below[:] = [name for name in below if name != "proc"]
    for name in names:
        path = os.path.join(place, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and mode & 0o6000:
            through.append(path)
for name, action in (("setuid", os.setuid), ("setgid", os.setgid)):
    fails(name, action, 0)
fails("setgroups", os.setgroups, [0])
fails("chown", lambda: (open("/tmp/f", "w"), os.chown("/tmp/f", 0, 0)))
if libc.prctl(39, 0, 0, 0, 0) != 1:
    through.append("new privileges are possible")
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
if libc.capset(header, sets) == 0:
    through.append("capset")
for line in open("/proc/self/status"):
    if line.startswith("Cap") and int(line.split()[1], 16):
        through.append(line.strip())
""", nothing_through),
    Attempt("descriptors", "Was it given a descriptor or memory that is not its own?", r"""
for number in range(3, 65536):
    fails(f"descriptor {number}", os.fstat, number)
for line in open("/proc/self/maps"):
    if line.split()[1][1] == "w" and line.split()[1][3] == "s":
        through.append("shared memory " + line.strip())
for number in (0, 1, 2):
    if not stat.S_ISFIFO(os.fstat(number).st_mode):
        through.append(f"{number} is no pipe")
""", nothing_through),
    Attempt("signals", "Can it signal, stop or slow PID 1 or anyone else?", r"""
for number in (9, 15, 19, 11, 1, 2, 0):
    fails(f"signal {number}", os.kill, 1, number)
fails("all", os.kill, -1, 0)
fails("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(1), 9))
fails("priority", os.setpriority, os.PRIO_PROCESS, 1, 19)
fails("scheduler", os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))
fails("affinity", os.sched_setaffinity, 1, {0})
fails("limits", resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))
fails("oom", write, "/proc/1/oom_score_adj", "1000")
through.extend(p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid())
""", nothing_through),
    Attempt("network", "Does any address answer, or any interface exist?", r"""
for host in ("192.0.2.1", "169.254.169.254", "127.0.0.1", "10.0.0.1", "::1", "2001:db8::1"):
    for port in (22, 53, 80, 6379, 8000):
        begun = time.monotonic()
        fails(f"{host}:{port}", lambda: socket.create_connection((host, port), 1))
        if time.monotonic() - begun > 0.5:
            through.append(f"{host}:{port} was waited for")
datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fails("datagram", datagram.sendto, b"x", ("192.0.2.1", 53))
fails("broadcast", datagram.sendto, b"x", ("255.255.255.255", 67))
for line in open("/proc/self/net/dev").readlines()[2:]:
    if line.split(":")[0].strip() != "lo":
        through.append(line)
datagram.close()
for table in ("tcp", "tcp6", "udp", "unix", "route", "arp"):
    through.extend(open(f"/proc/self/net/{table}").readlines()[1:])
""", nothing_through),
    Attempt("socket families", "Which kinds of socket does the kernel offer it?", r"""
for family in (*range(3, 10), *range(11, 47)):
    for kind in (1, 2, 3, 5):
        fails(f"family {family}", socket.socket, family, kind)
for protocol in (1, 6, 17, 58, 255):
    fails(f"raw {protocol}", socket.socket, socket.AF_INET, socket.SOCK_RAW, protocol)
    fails(f"raw 6 {protocol}", socket.socket, socket.AF_INET6, socket.SOCK_RAW, protocol)
""", nothing_through),
    Attempt("host sockets", "Is a socket of the service or the host in reach?", r"""
for place, below, names in os.walk("/"):
    if place == "/":
        below[:] = [name for name in below if name != "proc"]
    for name in names:
        if stat.S_ISSOCK(os.lstat(os.path.join(place, name)).st_mode):
            through.append(os.path.join(place, name))
for name in (b"\0/tmp/.X11-unix/X0", b"\0/org/freedesktop/systemd1", b"\0/containerd-shim",
             b"/run/docker.sock", b"/var/run/dbus/system_bus_socket"):
    fails(repr(name), socket.socket(socket.AF_UNIX).connect, name)
""", nothing_through),
    Attempt("shared objects", "Can it leave System V objects, queues or semaphores behind?", r"""
refused(shmget=(29, 7, 4096, 0o1666), semget=(64, 7, 1, 0o1666), msgget=(68, 7, 0o1666),
        mq_open=(240, b"q", 0o102, 0o666, 0))
""", nothing_through),
    Attempt("kernel pools", "Can it use up what all processes of the host share?", r"""
refused(inotify=(253,), inotify1=(294, 0), aio=(206, 30000, bytes(8)), fanotify=(300, 0, 0),
        seccomp=(317, 1, 0, 0), memfd_secret=(447, 0), mbind=(237, 0, 0, 0, 0, 0, 0),
        set_mempolicy=(238, 0, 0, 0), move_pages=(279, 0, 0, 0, 0, 0, 0))
if libc.prctl(22, 2, 0, 0, 0) == 0 or ctypes.get_errno() == errno.EFAULT:
    through.append("PR_SET_SECCOMP")
for what in ("MEMLOCK", "MSGQUEUE", "NICE", "RTPRIO", "SIGPENDING", "NOFILE", "NPROC", "CORE"):
    kind = getattr(resource, f"RLIMIT_{what}")
    hard = resource.getrlimit(kind)[1]
    fails(f"raise {what}", resource.setrlimit, kind, (hard + 1, hard + 1))
fails("nice", os.nice, -1)
fails("real time", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
""", nothing_through),
    Attempt("terminal", "Can it type into a terminal, or change its own personality?", r"""
refused(tiocsti=(16, 0, 0x5412, b"x"), tioclinux=(16, 0, 0x541C, b"x"),
        personality=(135, 0x0040000), vhangup=(153,))
absent("/dev/tty", "/dev/console", "/dev/ptmx", "/dev/pts")
""", nothing_through),
    Attempt("secrets", "Is anything of the service in its environment?", r"""
for name in os.environ:
    if any(part in name for part in ("ROLLYARD", "KEY", "TOKEN", "SECRET", "AWS", "REDIS")):
        through.append(name)
if b"ROLLYARD" in open("/proc/self/environ", "rb").read():
    through.append("/proc/self/environ")
through.extend(line.strip() for line in open("/proc/self/cgroup") if "slot-" in line)
""", nothing_through),
    Attempt("oom score", "Can it have another killed for want of memory in its stead?", r"""
for score in ("-1000", "-1"):
    fails(score, write, "/proc/self/oom_score_adj", score)
""", nothing_through),
    Attempt("core files", "Does a crash write a file, or start a program of the host?", r"""
fails("core limit", resource.setrlimit, resource.RLIMIT_CORE, (1 << 20, 1 << 20))
if not through:
    ctypes.string_at(8)
""", no_core),
    Attempt("forged result", "Can it write or choose how its end is reported?", r"""
import struct, threading
report = struct.pack("<BBBiQQQ", 1, 0, 1, 0, 1, 1, 1)
for number in range(0, 1024):
    for text in (report, b'{"outcome": "ok", "exit_code": 0}\n'):
        try:
            os.write(number, text)
        except OSError:
            pass
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
os._exit(3)
""", told_truly),
    Attempt("survivors", "Does a process that hides live on after the run?", r"""
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        for number in range(1, 65):
            if number not in (9, 19, 32, 33):
                signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            if os.fork():
                os.kill(os.getpid(), 19)
            os.closerange(0, 3)
            while True:
                time.sleep(1)
        os.execv("/opt/python/bin/python3", ["python3", "-c", "import time; time.sleep(600)"])
""", nothing_through),
    Attempt("earlier memory", "Does it find an earlier run's code, input or output in memory?", r"""
import re
pattern = re.compile(rb"@PATTERN@")
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps"):
        where, mode = line.split()[:2]
        if "[v" not in line and mode[0] == "r":
            start, end = (int(word, 16) for word in where.split("-"))
            memory.seek(start)
            if pattern.search(memory.read(end - start)):
                through.append(line.strip())
""", nothing_through, before=r"""
text = "@SECRET@" + sys.stdin.read()
print(text, flush=True)
print(text, file=sys.stderr)
open("@SECRET@", "w").write(text)
os.environ["@SECRET@"] = text
"""),
    Attempt("earlier files", "Does it find what an earlier run left: files, modes, umask, names?",
            r"""
for place in ("/box", "/tmp", "/dev/shm", "/var/tmp"):
    for path, below, names in os.walk(place):
        through.extend(os.path.join(path, name) for name in names if name != "main.py")
for place in ("/box/work", "/tmp", "/dev/shm"):
    if stat.S_IMODE(os.stat(place).st_mode) != 0o755 or os.listxattr(place):
        through.append(f"mode of {place}")
if os.umask(0o22) != 0o22 or os.getcwd() != "/box/work" or "LEFT" in os.environ:
    through.append("state of the process")
if os.nice(0) != os.getpriority(os.PRIO_PROCESS, 1):  # a worker may be nice itself
    through.append("priority of the process")
fails("bound name", socket.socket(socket.AF_UNIX).connect, b"\0left")
""", nothing_through, before=r"""
for place in ("/box/work", "/tmp", "/dev/shm"):
    os.makedirs(place + "/deep/er", exist_ok=True)
    open(place + "/deep/er/file", "w").write("left")
    os.symlink("/etc/passwd", place + "/link"); os.mkfifo(place + "/pipe"); os.chmod(place, 0o1777)
os.umask(0); os.environ["LEFT"] = "1"; os.nice(5)
name = socket.socket(socket.AF_UNIX); name.bind(b"\0left"); name.listen()
"""),
)  # fmt: skip
