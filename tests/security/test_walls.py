"""Each wall, tried from inside by a program and looked at from outside."""

import contextlib
import os
import re
import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from live_service import CANARY_TEXT, CANARY_VALUE, Service
from programs import ran, run, running
from requirements import requirement

from rollyard.types import MIB, Limits
from rollyard_sandbox.guest import landlock

NAMESPACES = ("user", "mnt", "pid", "ipc", "net", "uts", "cgroup")


@contextlib.contextmanager
def held(service: Service, count: int) -> Generator[list[int]]:
    """Host pids of ``count`` programs that run until the block ends."""
    with running(service, *["import time; time.sleep(60)"] * count):
        yield [one.pid for one in service.family().programs]


def _namespaces(pid: int | str) -> dict[str, str]:
    return {name: str(Path(f"/proc/{pid}/ns/{name}").readlink()) for name in NAMESPACES}


def _ids(pid: int) -> list[int]:
    """Real, effective, saved and file-system user and group ids, as the host counts them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [
        int(word) for line in lines if line[:4] in ("Uid:", "Gid:") for word in line.split()[1:]
    ]


@requirement("wall.user")
def test_a_program_is_another_unprivileged_user_of_the_host(service: Service) -> None:
    code = "print(os.getuid() == 0, os.getgroups(), tried(os.setuid, 0), tried(os.setgid, 0))"
    assert ran(service, code) == "False [] EPERM EPERM\n"
    with held(service, 2) as pids:
        seen = [set(_ids(pid)) for pid in pids]
        assert all(min(ids) >= 1000 for ids in seen)
        assert not seen[0] & seen[1], "two slots share a user: limits and signals would meet"
        slots = {user for one in service.family().slots for user in _ids(one.pid)}
        assert not slots & (seen[0] | seen[1])


@requirement("wall.user", "wall.mount", "wall.pid", "wall.ipc", "wall.network", "wall.uts")
def test_slots_share_no_namespace_with_the_host_nor_with_each_other(service: Service) -> None:
    ours = _namespaces("self")
    with held(service, 2) as pids:
        first, second = map(_namespaces, pids)
    for name in NAMESPACES:
        assert ours[name] not in (first[name], second[name]), name
    for name in ("mnt", "pid", "ipc", "net", "uts"):
        assert first[name] != second[name], name


@requirement("wall.mount")
def test_the_root_is_read_only_and_has_nothing_of_the_host(service: Service) -> None:
    code = """
places = ["/x", "/usr/x", "/etc/passwd", "/opt/python/x", "/opt/rollyard/x", "/dev/x", "/box/x"]
print([p for p in places if tried(open, p, "w") == "allowed"])
print(sorted(os.listdir("/")))
print([p for p in ("/root", "/home", "/srv", "/sys", "/run", "/mnt", "/boot") if os.path.exists(p)])
print(sorted(os.listdir("/dev")))
print(tried(os.listdir, "/proc/1/root"), tried(os.chroot, "."))
"""
    lines = ran(service, code).splitlines()
    assert lines[0] == "[]"
    assert set(eval(lines[1])) <= {"bin", "box", "dev", "etc", "lib", "lib64", "opt", "proc", "tmp",
                                   "usr", "var"}  # fmt: skip
    assert lines[2] == "[]"
    assert set(eval(lines[3])) == {"null", "zero", "full", "random", "urandom", "shm", "fd",
                                   "stdin", "stdout", "stderr"}  # fmt: skip
    assert "allowed" not in lines[4]


@requirement("wall.mount", "wall.environment")
def test_no_secret_is_anywhere_in_sight(service: Service) -> None:
    """Not in a readable file, the environment, or the memory that a program was forked with."""
    secrets = (CANARY_VALUE, CANARY_TEXT, str(service.directory), "ROLLYARD_REDIS_URL")
    # As patterns that do not match themselves, or the program would find its own text.
    patterns = [f"{re.escape(word[:-1])}[{word[-1]}]" for word in secrets]
    code = f"""
import re
patterns = [re.compile(one.encode()) for one in {patterns!r}]
hits, looked = [], 0
def look(name, data):
    global looked
    looked += len(data)
    hits.extend((name, pattern.pattern) for pattern in patterns if pattern.search(data))
for place, below, names in os.walk("/"):
    if place == "/":
        below[:] = [name for name in below if name not in ("proc", "opt", "usr", "lib", "lib64")]
    for name in names:
        if os.path.isfile(os.path.join(place, name)) and place != "/dev":
            look(name, open(os.path.join(place, name), "rb").read())
for name in ("environ", "cmdline", "mountinfo", "cgroup", "status"):
    look(name, open("/proc/self/" + name, "rb").read())
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps").read().splitlines():
        where, mode = line.split()[:2]
        if "[v" not in line and mode[0] == "r":
            start, end = (int(word, 16) for word in where.split("-"))
            memory.seek(start)
            look(line, memory.read(end - start))
print(hits, looked > 10 << 20)
"""
    assert ran(service, code, Limits(timeout_s=60)) == "[] True\n"


@requirement("wall.environment")
def test_the_environment_is_the_same_few_variables(service: Service) -> None:
    names = eval(ran(service, "print(sorted(os.environ))"))
    assert set(names) <= {
        "HOME", "LANG", "LC_ALL", "LOGNAME", "MKL_NUM_THREADS", "MPLBACKEND", "NUMEXPR_NUM_THREADS",
        "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PYTHONHASHSEED",
        "PYTHONIOENCODING", "TZ", "USER",
    }  # fmt: skip


@requirement("wall.pid")
def test_a_program_sees_and_signals_itself_only(service: Service) -> None:
    code = """
print([p for p in os.listdir("/proc") if p.isdigit()] == [str(os.getpid())], os.getppid())
print(tried(os.kill, 1, 0), tried(os.kill, 1, 9), tried(os.kill, 1, 19))
print(tried(open, "/proc/1/status"), tried(os.readlink, "/proc/1/exe"))
others = [p for p in range(2, 5000) if p != os.getpid() and tried(os.kill, p, 0) == "allowed"]
print(others)
"""
    with held(service, 1):
        lines = ran(service, code).splitlines()
    assert lines[0] == "True 1"
    assert lines[1] == "EPERM EPERM EPERM"
    assert "allowed" not in lines[2]
    assert lines[3] == "[]"


@requirement("wall.ipc")
def test_no_object_of_the_host_or_of_a_neighbour_is_there(service: Service) -> None:
    inside = """
from multiprocessing import shared_memory
print(os.listdir("/dev/shm"), tried(shared_memory.SharedMemory, "rollyard-wall"))
print([libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)])
"""
    place = Path("/dev/shm/rollyard-wall")
    place.write_text("of the host")
    try:
        assert ran(service, inside) == "[] ENOENT\n[-1, -1, -1]\n"
    finally:
        place.unlink()


@requirement("wall.uts")
def test_the_host_name_is_not_the_hosts(service: Service) -> None:
    code = "print(socket.gethostname(), tried(socket.sethostname, 'x'), os.uname().nodename)"
    assert ran(service, code) == "rollyard EPERM rollyard\n"


@requirement("wall.network")
def test_nothing_is_reachable_and_all_is_refused_at_once(service: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        port = tcp.getsockname()[1]
        abstract.bind(f"\0rollyard-{os.getpid()}")  # these have no path: only the namespace hides
        abstract.listen()
        paths = [str(service.directory / "valkey.sock"), str(service.directory / "gateway.sock"),
                 abstract.getsockname().decode()]  # fmt: skip
        code = f"""
began = time.monotonic()
answers = []
for host, port in (("127.0.0.1", {port}), ("::1", {port}), ("10.0.0.1", 80), ("1.1.1.1", 53),
                   ("169.254.169.254", 80), ("0.0.0.0", {port})):
    answers.append(tried(socket.create_connection, (host, port), 5))
for path in {paths!r}:
    answers.append(tried(socket.socket(socket.AF_UNIX).connect, path))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
answers.append(tried(udp.sendto, b"x", ("1.1.1.1", 53)))
answers.append(tried(socket.getaddrinfo, "example.org", 80))
for family in (socket.AF_NETLINK, socket.AF_PACKET, 40, 38, 44, 16, 29):
    answers.append(tried(socket.socket, family, socket.SOCK_RAW))
print([one for one in answers if one == "allowed"], time.monotonic() - began < 1)
print([line.split(":")[0].strip() for line in open("/proc/self/net/dev") if ":" in line])
"""
        lines = ran(service, code).splitlines()
        tcp.settimeout(0.2)
        with pytest.raises(TimeoutError):
            tcp.accept()
    assert lines[0] == "[] True"
    assert set(eval(lines[1])) <= {"lo"}


@requirement("wall.capabilities", "wall.no_new_privileges")
def test_no_capability_and_no_way_to_gain_one(service: Service) -> None:
    code = """
print({status(name) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")})
print(status("NoNewPrivs"), tried(os.chown, "/box/work", 0, 0), tried(os.mknod, "n", 0o20600, 259))
"""
    assert ran(service, code) == "{'0000000000000000'}\n1 EPERM EPERM\n"


@requirement("wall.no_new_privileges", "wall.mount")
def test_no_set_user_id_program_and_no_such_mount(service: Service) -> None:
    code = """
print([os.path.join(d, n) for d, _, names in os.walk("/") if not d.startswith("/proc")
       for n in names if os.lstat(os.path.join(d, n)).st_mode & 0o6000])
lines = [line.split() for line in open("/proc/self/mountinfo")]
print([line[4] for line in lines if "nosuid" not in line[5] and line[4] != "/proc"])
"""
    assert ran(service, code, Limits(timeout_s=30)) == "[]\n[]\n"


@requirement("wall.seccomp_tree", "wall.seccomp_slot")
def test_both_filters_are_on_for_the_program_and_what_it_starts(service: Service) -> None:
    code = """
import subprocess
print(status("Seccomp"), int(status("Seccomp_filters")) >= 2)
inner = "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('Seccomp')])"
print(subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True).stdout, end="")
"""
    assert ran(service, code) == "2 True\n['2', '2']\n"


@requirement("wall.landlock")
def test_landlock_refuses_before_the_network_namespace_does(service: Service) -> None:
    code = """
import socket
address = ("192.0.2.1", 9)
print(tried(socket.create_connection, address, 0.5), tried(open, "/dev/null", "w"))
"""
    refusal = "EACCES" if landlock.version() >= 4 else "ENETUNREACH"
    assert ran(service, code) == f"{refusal} allowed\n"


@requirement("wall.descriptors")
def test_three_descriptors_and_no_shared_memory_with_anyone(service: Service) -> None:
    code = """
print(sorted(int(n) for n in os.listdir("/proc/self/fd"))[:3])
print([n for n in range(3, 65536) if tried(os.fstat, n) == "allowed"])
modes = [line.split()[1] for line in open("/proc/self/maps")]
print([mode for mode in modes if mode[1] == "w" and mode[3] == "s"])
print([os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in (0, 1, 2)])
"""
    assert ran(service, code) == "[0, 1, 2]\n[]\n[]\n['pipe', 'pipe', 'pipe']\n"


@requirement("wall.rlimits")
def test_resource_limits_hold_and_cannot_be_raised(service: Service) -> None:
    code = """
bounds = {"CORE": 0, "NOFILE": 1024, "MEMLOCK": 65536, "MSGQUEUE": 0, "SIGPENDING": 256,
          "RTPRIO": 0, "NICE": 0, "NPROC": 7, "FSIZE": 3 << 20}
for name, bound in bounds.items():
    what = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(what)[1]
    if not 0 <= hard <= bound:
        print(name, hard)
    try:
        resource.setrlimit(what, (hard + 1, hard + 1))
        print(name, "raised")
    except (ValueError, OSError):
        pass
print(tried(os.nice, -1), tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)))
"""
    assert ran(service, code, Limits(pids=7, disk_bytes=3 * MIB)) == "EPERM EPERM\n"


@requirement("wall.tmpfs")
@pytest.mark.parametrize("place", ["/box/work", "/tmp", "/dev/shm", "/var/tmp"])
def test_writing_ends_at_the_size_and_at_the_number_of_files(service: Service, place: str) -> None:
    code = f"""
total = 0
try:
    for number in range(64):
        with open(f"{place}/f{{number}}", "wb") as file:
            total += file.write(b"x" * (1 << 20))
    print("no end")
except OSError as error:
    print(errno.errorcode[error.errno], total <= 4 << 20)
for name in os.listdir({place!r}):
    if name != "main.py":
        os.unlink(os.path.join({place!r}, name))
made = 0
try:
    for number in range(200_000):
        os.close(os.open(f"{place}/g{{number}}", os.O_CREAT | os.O_WRONLY))
        made += 1
    print("no end")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    assert ran(service, code, Limits(disk_bytes=4 * MIB)) == "ENOSPC True\nENOSPC\n"


@requirement("wall.cgroup_memory")
@pytest.mark.parametrize(
    "code",
    [
        "b = bytearray(512 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1",
        "for _ in range(8):\n    if os.fork() == 0:\n        b = b'x' * (40 << 20)\n        "
        "time.sleep(20)\n        os._exit(0)\nos.wait()\nos._exit(1)",
        "with open('/tmp/f', 'wb') as f:\n    while True: f.write(b'x' * (1 << 20))",
        "import mmap\nm = mmap.mmap(-1, 512 << 20)\nfor i in range(0, len(m), 4096): m[i] = 1",
        "fds = [os.memfd_create('m') for _ in range(8)]\n"
        "for fd in fds:\n    for _ in range(64): os.write(fd, b'x' * (1 << 20))",
    ],
    ids=["one block", "many processes", "files", "shared mapping", "memory files"],
)
def test_the_memory_limit_counts_everything(service: Service, code: str) -> None:
    result = run(service, code, Limits(memory_bytes=128 * MIB, disk_bytes=1024 * MIB))
    assert result.outcome == "memory", result
    assert result.peak_memory_bytes <= 128 * MIB
    assert "memory limit" in result.message


@requirement("wall.cgroup_memory", "result.truthful")
@pytest.mark.parametrize("end", ["os._exit(137)", "os.kill(os.getpid(), 9)", "raise MemoryError"])
def test_what_merely_looks_like_the_memory_limit_is_not(service: Service, end: str) -> None:
    assert run(service, end).outcome == {
        "os._exit(137)": "error",
        "raise MemoryError": "error",
    }.get(end, "signal")


@requirement("wall.cgroup_pids")
def test_the_number_of_processes_is_bounded(service: Service) -> None:
    code = """
born = 0
try:
    while born < 400:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        born += 1
except OSError as error:
    print(errno.errorcode[error.errno], born)
"""
    assert ran(service, code, Limits(pids=10)) == "EAGAIN 9\n"
    flood = "import threading\n" + code.replace(
        "if os.fork() == 0:\n            time.sleep(20)\n            os._exit(0)",
        "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()",
    ).replace("except OSError as error:\n    print(errno.errorcode[error.errno], born)",
              "except RuntimeError:\n    print(born)")  # fmt: skip
    assert ran(service, flood, Limits(pids=10)) == "9\n"
