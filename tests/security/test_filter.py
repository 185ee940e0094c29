"""The system-call filter, both ways: what is refused, and what must go on working."""

import pytest
from live_service import Service
from programs import named, ran, run
from requirements import requirement

from rollyard.types import Limits
from rollyard_sandbox.guest import calls
from rollyard_sandbox.guest import filter as system_calls

HIDDEN, REFUSED = (
    {name: calls.X86_64[name] for name in names}
    for names in (system_calls._HIDDEN, system_calls._REFUSED)  # pyright: ignore[reportPrivateUsage]
)


@requirement("filter.refuses", "wall.seccomp_slot", "wall.seccomp_tree")
def test_every_call_on_the_lists_is_refused(service: Service) -> None:
    code = f"""
def answer(number):
    ctypes.set_errno(0)
    return libc.syscall(number, 0, 0, 0, 0, 0, 0), errno.errorcode.get(ctypes.get_errno())
for name, number in {HIDDEN!r}.items():
    if answer(number) != (-1, "ENOSYS"):
        print(name, answer(number))
for name, number in {REFUSED!r}.items():
    if answer(number) != (-1, "EPERM"):
        print(name, answer(number))
"""
    assert ran(service, code) == ""


ARGUMENTS = named(
    r"""
## a namespace by clone
for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    print(libc.syscall(56, bit | 17, 0, 0, 0, 0), ctypes.get_errno())
## families of sockets
for family in range(64):
    if family not in (1, 2, 10):
        print(libc.socket(family, 1, 0), {97: 1}.get(ctypes.get_errno(), ctypes.get_errno()))
## device nodes
for kind in (0o020600, 0o060600):
    print(libc.syscall(133, b"d", kind, 0x103), ctypes.get_errno())
    print(libc.syscall(259, -100, b"d", kind, 0x103), ctypes.get_errno())
## personalities
for value in (0x0040000, 8, 0x0400000):
    print(libc.personality(value), ctypes.get_errno())
## the process's own tracer, memory map, time-stamp counter and merging of pages
for option in (0x59616D61, 35, 26, 67):
    print(libc.prctl(option, 1, 0, 0, 0), ctypes.get_errno())
## leases and notices of what others do with a directory
for command in (1024, 1026):
    for argument in (0, 1, 0x8000003f):
        print(libc.fcntl(os.open("/usr", 0), command, argument), ctypes.get_errno())
## huge pages of the memory that all forks of a template share, and pages merged with others'
for line in open("/proc/self/maps").readlines():
    if "memfd:" in line:
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        span = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        for advice in (12, 25):
            print(libc.madvise(*span, advice), ctypes.get_errno())
## text pushed into a terminal
for request in (0x5412, 0x541C):
    print(libc.ioctl(0, request, b"x"), ctypes.get_errno())
"""
)


@requirement("filter.refuses")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_calls_that_arguments_decide(service: Service, name: str) -> None:
    lines = ran(service, ARGUMENTS[name]).splitlines()
    assert set(lines) == {"-1 1"}, lines


@requirement("filter.refuses")
@pytest.mark.parametrize(
    "machine_code",
    [
        pytest.param("b814000000cd80c3", id="32-bit calls: mov eax, 20; int 0x80; ret"),
        pytest.param("b827000040" + "0f05c3", id="x32 calls: mov eax, 0x40000027; syscall; ret"),
    ],
)
def test_a_foreign_calling_convention_kills(service: Service, machine_code: str) -> None:
    code = f"""
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex({machine_code!r}))
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_long)(address)())
"""
    result = run(service, code)
    assert (result.outcome, result.signal) == ("signal", 31), result


@requirement("filter.refuses")
def test_the_filter_cannot_be_taken_off(service: Service) -> None:
    code = """
import subprocess
before = status("Seccomp_filters")
libc.prctl(22, 0, 0, 0, 0); libc.prctl(38, 0, 0, 0, 0); libc.syscall(317, 1, 0, 0)
print(status("Seccomp_filters") == before, status("Seccomp"), tried(os.unshare, 0x10000000))
"""
    assert ran(service, code) == "True 2 EPERM\n"


LIBRARIES = named(
    r"""
## asyncio
import asyncio
async def echo(reader, writer):
    writer.write(await reader.readline()); await writer.drain(); writer.close()
async def main():
    server = await asyncio.start_unix_server(echo, "/tmp/s")
    reader, writer = await asyncio.open_unix_connection("/tmp/s")
    writer.write(b"ok\n")
    assert await reader.readline() == b"ok\n"
    writer.close(); server.close()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(6)", stdout=-1)
    assert (await process.communicate())[0] == b"6\n"
    assert await asyncio.to_thread(sum, [1, 2]) == 3
    await asyncio.gather(*(asyncio.sleep(0.01) for _ in range(50)))
asyncio.run(main())
## multiprocessing
import multiprocessing as mp
if __name__ == "__main__":
    for kind in ("fork", "spawn", "forkserver"):
        context = mp.get_context(kind)
        with context.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        queue = context.Queue(); queue.put(1); assert queue.get() == 1
        value = context.Value("i", 3); assert value.value == 3
    with mp.Manager() as manager:
        assert list(manager.list([1])) == [1]
## threads
import threading, queue
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    assert sum(pool.map(abs, range(-100, 0))) == 5050
event = threading.Event(); threading.Timer(0.01, event.set).start(); assert event.wait(5)
assert threading.Barrier(1).wait() == 0
## subprocesses
import subprocess
assert subprocess.run(["sh", "-c", "echo $((6 * 7)) | cat"], capture_output=True).stdout == b"42\n"
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\n"
assert os.popen("echo x").read() == "x\n"
## numpy
import numpy as np
a = np.random.default_rng(1).normal(size=(200, 200))
assert abs(np.linalg.det(a)) > 0 and np.fft.fft(a).shape == (200, 200)
np.save("/tmp/a.npy", a); assert (np.load("/tmp/a.npy", mmap_mode="r") == a).all()
## pandas
import io, pandas as pd
frame = pd.DataFrame({"a": range(5), "b": list("xyxyx")})
frame.to_csv("/tmp/f.csv"); assert pd.read_csv("/tmp/f.csv").a.sum() == 10
assert frame.groupby("b").a.sum()["x"] == 6
## scipy
from scipy import optimize, integrate, sparse, stats
assert abs(optimize.brentq(lambda x: x * x - 2, 0, 2) - 2 ** 0.5) < 1e-9
assert abs(integrate.quad(lambda x: x, 0, 1)[0] - 0.5) < 1e-9
assert stats.norm.cdf(0) == 0.5
## sympy
import sympy as s
x = s.Symbol("x")
assert s.integrate(s.sin(x), (x, 0, s.pi)) == 2 and s.solve(x ** 2 - 4, x) == [-2, 2]
## networkx
import networkx as nx
assert nx.shortest_path_length(nx.path_graph(9), 0, 8) == 8
## sqlite
import sqlite3
for place in (":memory:", "/tmp/d.sqlite"):
    with sqlite3.connect(place) as db:
        db.execute("pragma journal_mode=wal"); db.execute("create table t (x)")
        db.executemany("insert into t values (?)", [(i,) for i in range(100)])
        assert db.execute("select sum(x) from t").fetchone() == (4950,)
## ssl and hashes
import hashlib, hmac, secrets, ssl
ssl.create_default_context(); hashlib.scrypt(b"x", salt=b"y", n=2, r=1, p=1)
assert len(secrets.token_bytes(9)) == 9 and hmac.new(b"k", b"m", "sha256").hexdigest()
## files and archives
import bz2, fcntl, glob, gzip, json, lzma, mmap, pathlib, shelve, shutil, tarfile, tempfile, zipfile
with tempfile.TemporaryDirectory() as place:
    for module in (bz2, gzip, lzma):
        with module.open(place + "/x", "wb") as f: f.write(b"x" * 9999)
        assert len(module.open(place + "/x").read()) == 9999
    with zipfile.ZipFile(place + "/z", "w") as z: z.writestr("a", "b")
    with tarfile.open(place + "/t", "w") as t: t.add(place + "/z")
    shutil.copytree(place, place + "2"); shutil.rmtree(place + "2")
    with open(place + "/x", "r+b") as f:
        fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_UN)
        assert mmap.mmap(f.fileno(), 0)[:1]
    os.mkfifo(place + "/p"); os.link(place + "/x", place + "/y"); os.truncate(place + "/x", 3)
    with shelve.open(place + "/s") as kept: kept["a"] = [1]
## clocks, zones and signals
import datetime, signal, zoneinfo
tokyo = zoneinfo.ZoneInfo("Asia/Tokyo")
assert datetime.datetime(2024, 7, 1, tzinfo=tokyo).utcoffset().seconds == 32400
seen = []
signal.signal(signal.SIGALRM, lambda *a: seen.append(a)); signal.setitimer(0, 0.01)
while not seen: time.sleep(0.001)
assert signal.sigtimedwait([signal.SIGUSR1], 0.01) is None
## sockets between processes
a, b = socket.socketpair()
if os.fork() == 0:
    b.send(b"x"); os._exit(0)
assert a.recv(1) == b"x"
import select
poll = select.epoll(); poll.register(a, select.EPOLLOUT); assert poll.poll(1)
socket.send_fds(a, [b"x"], [0]); assert socket.recv_fds(b, 9, 1)[1]
## memory and code from memory
import mmap
m = mmap.mmap(-1, 1 << 20); m.madvise(mmap.MADV_DONTNEED)
fd = os.memfd_create("x"); os.truncate(fd, 9)
page = mmap.mmap(-1, 4096, prot=7); page.write(bytes.fromhex("b82a000000c3"))
assert ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() == 42
assert ctypes.CDLL("libm.so.6").abs(-3) == 3
## the rest of the standard library
import curses, dbm, decimal, email, http.client, importlib.resources, inspect, logging.handlers
import pdb, plistlib, pydoc, readline, sched, smtplib, tracemalloc, unittest.mock, urllib.request
import uuid, venv, wave, xml.etree.ElementTree, xmlrpc.client, zipapp
tracemalloc.start(); assert uuid.uuid1()
assert os.sched_getaffinity(0) and os.cpu_count() and os.getrandom(3) and os.uname()
"""
)


@requirement("filter.lets_work")
@pytest.mark.parametrize("name", LIBRARIES)
def test_ordinary_libraries_work(service: Service, name: str) -> None:
    result = run(service, LIBRARIES[name], Limits(timeout_s=60))
    assert (result.outcome, result.stderr) == ("ok", ""), result
