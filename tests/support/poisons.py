"""Programs that leave what they can, and one that looks for it: both sides of every leak test."""

from programs import named

# All that a program can find out about where it is. What differs by nature (time,
# random numbers, addresses, numbers of inodes) is left out.
LOOK_ROUND = r"""
import builtins, decimal, gc, glob, json, locale, logging, signal, threading, warnings
SOCKETS = ("unix", "tcp", "tcp6", "udp")
def files(place):
    found = []
    for directory, below, names in os.walk(place):
        for name in sorted(below + names):
            path = os.path.join(directory, name)
            attributes = os.listxattr(path, follow_symlinks=False)
            found.append((path, oct(os.lstat(path).st_mode), attributes))
    return sorted(found)
def space(place):
    now = os.statvfs(place)
    return now.f_blocks, now.f_bfree, now.f_ffree
def own(name):
    try:
        return open("/proc/self/" + name).read()
    except OSError as error:
        return error.errno
numpy = sys.modules.get("numpy")
umask = os.umask(0o22)
print(json.dumps({
    "files": files("/box"),
    "box": [oct(os.stat(p).st_mode) for p in ("/box", "/box/work", "/box/tmp", "/box/shm")],
    "space": space("/box"),
    "environment": dict(os.environ), "real environment": open("/proc/self/environ").read(),
    "directory": os.getcwd(), "umask": umask, "arguments": sys.argv, "path": sys.path,
    "modules": sorted(sys.modules), "hooks": [str(type(h)) for h in sys.meta_path + sys.path_hooks],
    "builtins": sorted(vars(builtins)), "main": sorted(vars(sys.modules["__main__"])),
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "mask": sorted(map(int, signal.pthread_sigmask(0, []))), "pending": sorted(signal.sigpending()),
    "timers": [signal.getitimer(n) for n in (0, 1, 2)],
    "limits": [resource.getrlimit(n) for n in range(16)],
    "priority": [os.getpriority(0, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
    "user": [os.getresuid(), os.getresgid(), os.getgroups()],
    "session": os.getsid(0) == os.getpid() == os.getpgrp(), "parent": os.getppid(),
    "number": os.getpid(),
    "own files": {name: own(name) for name in (
        "coredump_filter", "loginuid", "cgroup", "limits", "uid_map", "setgroups")},
    "autogroup": str(own("autogroup")).split()[1:],  # its number is counted for the whole machine
    "io priority": libc.syscall(252, 1, 0), "policy": libc.syscall(239, None, None, 0, None, 0),
    "flags": [libc.prctl(option, 0, 0, 0, 0) for option in (7, 13, 23, 27, 34, 42, 58)],
    "oom": open("/proc/self/oom_score_adj").read(), "threads": threading.active_count(),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int),
    "status": [line for line in open("/proc/self/status")
               if line.split(":")[0] in ("Umask", "TracerPid", "Seccomp", "Seccomp_filters",
               "NoNewPrivs", "CapEff", "THP_enabled", "SigQ", "Threads", "Groups")],
    "personality": libc.personality(0xffffffff), "dumpable": libc.prctl(3), "death": libc.prctl(38),
    "slack": libc.prctl(30), "name": open("/proc/self/comm").read(),
    "sockets": [len(open("/proc/self/net/" + n).readlines())
                for n in SOCKETS],
    "host": os.uname().nodename, "ipc": glob.glob("/dev/mqueue/*"),
    "streams": [(s.encoding, s.errors, s.line_buffering, s.name) for s in
                (sys.stdin, sys.stdout, sys.stderr)],
    "interpreter": [sys.getrecursionlimit(), sys.get_int_max_str_digits(), sys.getswitchinterval(),
                    sys.dont_write_bytecode, gc.isenabled(), gc.get_threshold(),
                    str(sys.excepthook), str(sys.displayhook), sys.gettrace(), sys.getprofile(),
                    str(sys.unraisablehook), str(threading.excepthook)],
    "decimal": str(decimal.getcontext()), "locale": locale.setlocale(locale.LC_ALL),
    "zone": [time.tzname, time.timezone], "warnings": [str(f) for f in warnings.filters],
    "logging": [logging.root.level, len(logging.root.handlers),
                sorted(logging.root.manager.loggerDict)],
    "numbers": [7 + 1, len("abc"), hash("text"), True, 3 + 4 == 7],
    "numpy": numpy and [numpy.get_printoptions(), numpy.geterr(), str(numpy.zeros(2))],
}, sort_keys=True, default=str))
"""

# Without the tables of the whole machine's hash buckets, which take the kernel 9 ms to walk.
LOOK_ROUND_QUICKLY = LOOK_ROUND.replace('"unix", "tcp", "tcp6", "udp"', '"unix",')

POISONS = named(
    r"""
## files everywhere
for place in ("/box/work", "/var/tmp", "/dev/shm", os.path.expanduser("~/.config")):
    os.makedirs(place, exist_ok=True)
    open(place + "/left", "w").write("x")
    open(place + "/.hidden", "w").write("x")
    os.symlink("/etc/passwd", place + "/link")
    os.mkfifo(place + "/pipe")
    os.mkdir(place + "/closed", 0)
## modes and attributes of the places themselves
for place in ("/box/work", "/box/tmp", "/box/shm"):
    os.setxattr(place, "user.left", b"x")
    os.chmod(place, 0o7777)
## places moved and replaced
os.chdir("/")
for place in ("/box/work", "/box/tmp", "/box/shm"):
    tried(os.rename, place, place + "-old")
    tried(os.rmdir, place)
    tried(os.symlink, "/etc", place)
## modules to import
for name in ("json.py", "sitecustomize.py", "usercustomize.py", "numpy.py", "colorsys.py"):
    open(name, "w").write("raise SystemExit(9)")
os.makedirs(os.path.expanduser("~/.local/lib/python3.12/site-packages"))
open(os.path.expanduser("~/.local/lib/python3.12/site-packages/x.pth"), "w").write("import os")
## an unlinked file that fills the box
f = open("gone", "wb")
os.unlink("gone")
try:
    while True: f.write(b"x" * 65536)
except OSError: os._exit(0)
## environment, directory, umask
os.environ["LEFT"] = "1"
os.putenv("LEFT", "1")
os.chdir("/usr")
os.umask(0)
## signals and timers
import signal
for number in signal.valid_signals():
    tried(signal.signal, number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
signal.setitimer(signal.ITIMER_REAL, 0.05)
signal.setitimer(signal.ITIMER_VIRTUAL, 10)
os.kill(os.getpid(), signal.SIGUSR1)
## resource limits and priority
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
os.nice(10)
os.sched_setaffinity(0, {0})
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
## flags of the process
open("/proc/self/oom_score_adj", "w").write("1000")
libc.prctl(4, 0, 0, 0, 0)
libc.prctl(1, 9, 0, 0, 0)
libc.prctl(29, 1, 0, 0, 0)
libc.prctl(36, 1, 0, 0, 0)
libc.prctl(41, 1, 0, 0, 0)
libc.prctl(15, b"left", 0, 0, 0)
## interpreter settings
import builtins, decimal, gc, locale, logging, threading, warnings
sys.setrecursionlimit(70)
sys.set_int_max_str_digits(0)
gc.disable(); gc.set_threshold(1, 1, 1)
decimal.getcontext().prec = 2
warnings.simplefilter("error")
sys.setswitchinterval(3)
logging.basicConfig(level=1)
locale.setlocale(locale.LC_ALL, "C")
os.environ["TZ"] = "Asia/Tokyo"; time.tzset()
sys.settrace(lambda *a: None); threading.setprofile(lambda *a: None)
sys.path.insert(0, "/tmp"); sys.modules["math"] = None; sys.meta_path.clear()
builtins.left = builtins.len = lambda x: 99
sys.excepthook = sys.displayhook = sys.unraisablehook = print
## the small-integer cache and interned text
ctypes.c_uint32.from_address(id(7) + 24).value = 8
ctypes.memmove(id("left over") + 40, b"LEFT", 4)
## text that was never flushed
import io
sys.stdout.reconfigure(line_buffering=False)
sys.stdout.write("GHOST")
sys.stderr.write("GHOST")
os._exit(0)
## streams replaced and closed
import io
sys.stdout = io.StringIO(); sys.__stdout__ = None
os.close(1); os.dup2(2, 1)
os.open("/dev/null", os.O_RDWR)
## exit hooks and fork hooks
import atexit
atexit.register(print, "GHOST")
os.register_at_fork(after_in_child=lambda: print("GHOST"))
## survivors that write
if os.fork() == 0:
    os.setsid()
    while True:
        tried(os.write, 1, b"GHOST")
        open("/box/work/left", "w").write("x")
## sockets and shared memory
from multiprocessing import shared_memory, resource_tracker
s = socket.socket(socket.AF_UNIX); s.bind("\0left"); s.listen()
t = socket.create_server(("127.0.0.1", 4444))
m = shared_memory.SharedMemory("left", create=True, size=4096)
resource_tracker.unregister(m._name, "shared_memory")
import multiprocessing
keep = multiprocessing.get_context("fork").Semaphore()
libc.shmget(4444, 4096, 0o1666); libc.semget(4444, 1, 0o1666); libc.msgget(4444, 0o1666)
libc.mq_open(b"/left", 66, 0o666, None)
## numpy settings
import numpy
numpy.set_printoptions(precision=1, threshold=3)
numpy.seterr(all="raise")
numpy.random.seed(1)
numpy.sum = None
## kernel objects without a name
fds = [os.memfd_create("left"), os.eventfd(0), *os.pipe()]
import fcntl
fcntl.flock(open(os.__file__), fcntl.LOCK_EX)
libc.syscall(248, b"user", b"left", b"x", 1, -3)
## a crash
ctypes.string_at(0)
## a memory kill
b = bytearray(1 << 30)
for i in range(0, len(b), 4096): b[i] = 1
## a time-out with children
for _ in range(8):
    if os.fork() == 0: break
while True: pass
"""
)
