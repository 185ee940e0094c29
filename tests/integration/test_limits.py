"""Each limit of a run: just under it, at it and far beyond, alone and beside 32 doing the same.

Clocks are tested just under and beyond only: whether a program that needs exactly its time ends
before the clock looks is chance, and either is true.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from live_service import Service, serve
from process_tree import until
from programs import PRELUDE, running

import rollyard
from rollyard.types import MIB, Limits

SLOTS = 33  # one, and 32 beside it
MEMORY = 96 * MIB
HOG = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while True: pass
"""

neighbours = pytest.mark.parametrize("count", [1, SLOTS], ids=["alone", "beside others"])


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve("limits", slots=SLOTS, templates=("bare",)) as started:
        yield started
        assert until(lambda: not started.family().programs)


def runs(
    service: Service, count: int, code: str, limits: Limits, **options: Any
) -> list[rollyard.RunResult]:
    request = {"code": PRELUDE + code, "limits": limits, **options}
    return service.client.run_all([request] * count)


def printed(service: Service, count: int, code: str, limits: Limits) -> str:
    """What all of the runs printed, which must be one and the same, and end well."""
    results = runs(service, count, code, limits)
    assert {result.outcome for result in results} == {"ok"}, results[0]
    said = {result.stdout for result in results}
    assert len(said) == 1
    return said.pop()


# Memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overhead(service: Service) -> int:
    """What a run needs beside what its program asks for."""
    result = service.client.run(_touching(32 * MIB), limits=Limits(memory_bytes=MEMORY))
    assert result.outcome == "ok", result
    return max(0, result.peak_memory_bytes - 32 * MIB) or 8 * MIB


def _touching(size: int) -> str:
    return f"""
import mmap
memory = mmap.mmap(-1, {size}, mmap.MAP_PRIVATE)
for place in range(0, {size}, 4096): memory[place] = 1
"""


@neighbours
def test_memory_just_under_its_limit_is_given(service: Service, overhead: int, count: int) -> None:
    code = _touching(MEMORY - overhead - 2 * MIB)
    for result in runs(service, count, code, Limits(memory_bytes=MEMORY)):
        assert (result.outcome, result.message) == ("ok", ""), result
        assert result.peak_memory_bytes <= MEMORY


@neighbours
@pytest.mark.parametrize("beyond", [MIB, 8 * MEMORY], ids=["just beyond", "far beyond"])
def test_memory_beyond_its_limit_is_the_outcome_memory(
    service: Service, overhead: int, count: int, beyond: int
) -> None:
    code = _touching(MEMORY - overhead + beyond)
    for result in runs(service, count, code, Limits(memory_bytes=MEMORY)):
        assert result.outcome == "memory", result
        assert str(MEMORY) in result.message
        assert result.exit_code is None
        assert result.peak_memory_bytes <= MEMORY


def test_memory_that_no_machine_has_is_the_programs_own_error(service: Service) -> None:
    (result,) = runs(service, 1, "bytearray(1 << 60)", Limits(memory_bytes=MEMORY))
    assert (result.outcome, result.exit_code) == ("error", 1)
    assert "MemoryError" in result.stderr


# CPU ------------------------------------------------------------------------------------------

SPIN = "until = {cpu_s}\nwhile time.process_time() < until: pass\n"
CHILDREN = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    if os.fork() == 0:
        while time.process_time() < 0.05: pass
        os._exit(0)
    tried(os.wait)  # returns when all have ended; nobody gets their times
"""


# Two cores have to work for all of them.
CPU_LIMITS_S = {1: 0.25, SLOTS: 0.12}


@neighbours
def test_cpu_just_under_its_limit_is_given(service: Service, count: int) -> None:
    limit_s = CPU_LIMITS_S[count]
    asked_s = limit_s * 0.6
    limits = Limits(cpu_s=limit_s, timeout_s=120)
    for result in runs(service, count, SPIN.format(cpu_s=asked_s), limits):
        assert result.outcome == "ok", result
        assert asked_s * 950 < result.cpu_ms < limit_s * 1000


@neighbours
def test_cpu_beyond_its_limit_is_the_outcome_cpu_timeout(service: Service, count: int) -> None:
    """Beyond, far beyond, and by children that nobody waits for."""
    limit_s = CPU_LIMITS_S[count]
    limits = Limits(cpu_s=limit_s, timeout_s=120)
    beyond = (SPIN.format(cpu_s=3 * limit_s), SPIN.format(cpu_s=1e9), CHILDREN)
    codes = (beyond * count)[: max(count, len(beyond))]
    requests = [rollyard.RunRequest(code=PRELUDE + code, limits=limits) for code in codes]
    if count == 1:
        results = [service.client.submit(one) for one in requests]
    else:
        results = service.client.run_all(requests)
    for result in results:
        assert (result.outcome, result.exit_code) == ("cpu_timeout", None), result
        assert f"CPU limit of {limit_s} s reached" in result.message
        assert limit_s * 800 < result.cpu_ms < 800


# Wall clock -----------------------------------------------------------------------------------


@neighbours
def test_wall_clock_just_under_its_limit_is_given(service: Service, count: int) -> None:
    for result in runs(service, count, "time.sleep(0.8)", Limits(timeout_s=1.5)):
        assert result.outcome == "ok", result
        assert 800 <= result.wall_ms < 4500


@neighbours
@pytest.mark.parametrize("sleep_s", [1.0, 3600], ids=["beyond", "far beyond"])
def test_wall_clock_beyond_its_limit_is_the_outcome_timeout(
    service: Service, count: int, sleep_s: float
) -> None:
    code = f"print('before')\nfor n in range(1, 65):\n    if n not in (9, 19, 32, 33): " \
           f"__import__('signal').signal(n, 1)\ntime.sleep({sleep_s})"  # fmt: skip
    for result in runs(service, count, code, Limits(timeout_s=0.4)):
        assert (result.outcome, result.exit_code) == ("timeout", None), result
        assert "wall-clock limit of 0.4 s reached" in result.message
        assert result.wall_ms > 350  # the worker's clock starts a little before PID 1's
        assert result.stdout == "before\n", "what was printed before is there to read"


def test_busy_neighbours_do_not_time_a_run_out(service: Service) -> None:
    """Four runs on one core, three of which never stop: the fourth gets a quarter of it.

    It works until its limit is over by the wall clock, so that it always needs the allowance,
    however busy the machine is beside.
    """
    pinned = HOG.replace(
        "while True: pass", "begun = time.monotonic()\nwhile time.monotonic() - begun < 1.7: pass"
    )
    with running(service, *[HOG] * 3):
        (result,) = runs(service, 1, pinned, Limits(timeout_s=1.5))
        assert result.outcome == "ok", result
        assert result.wall_ms > 1600
        assert result.cpu_ms < 1200, "the neighbours did not keep it waiting: this shows nothing"
        (result,) = runs(service, 1, HOG, Limits(timeout_s=0.6))
        assert result.outcome == "timeout"
        waited = re.search(r"\((\d+) ms of waiting for a core not counted\)", result.message)
        assert waited, result.message
        assert 100 < int(waited[1]) <= 1200
        assert result.wall_ms >= 600 + int(waited[1]) - 50
        # Sleeping is not waiting for a core.
        (result,) = runs(service, 1, "time.sleep(60)", Limits(timeout_s=0.6))
        assert result.outcome == "timeout"
        assert result.wall_ms < 1800


# Processes ------------------------------------------------------------------------------------

FORKS = """
born = 0
try:
    while born < {most}:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        born += 1
    print("born", born)
except OSError as error:
    again = {{tried(os.fork) for _ in range(200)}}
    print(errno.errorcode[error.errno], born, again)
"""
THREADS = """
import threading
born, done = 0, threading.Event()
try:
    while born < {most}:
        threading.Thread(target=done.wait).start()
        born += 1
    print("born", born)
except RuntimeError:
    print("EAGAIN", born)
done.set()
"""


@neighbours
@pytest.mark.parametrize("pids", [1, 2, 16])
def test_processes_are_given_up_to_their_number(service: Service, count: int, pids: int) -> None:
    limits = Limits(pids=pids)
    most = pids - 1  # the program itself is one
    assert printed(service, count, FORKS.format(most=most), limits) == f"born {most}\n"
    refused = f"EAGAIN {most} {{'EAGAIN'}}\n"
    assert printed(service, count, FORKS.format(most=pids), limits) == refused
    assert printed(service, count, FORKS.format(most=1000), limits) == refused


@neighbours
def test_threads_count_as_processes(service: Service, count: int) -> None:
    limits = Limits(pids=12)
    assert printed(service, count, THREADS.format(most=11), limits) == "born 11\n"
    assert printed(service, count, THREADS.format(most=1000), limits) == "EAGAIN 11\n"


# Disk -----------------------------------------------------------------------------------------

WRITE = """
free = os.statvfs("/box").f_bavail * os.statvfs("/box").f_frsize
def write(path, size):
    file, done = os.open(path, os.O_CREAT | os.O_WRONLY), 0
    try:
        while done < size:
            done += os.write(file, bytes(min(size - done, 1 << 16)))
    except OSError as error:
        return errno.errorcode[error.errno], done
    finally:
        os.close(file)
    return "written", done
"""


@neighbours
@pytest.mark.parametrize("place", ["/box/work/f", "/tmp/f", "/dev/shm/f"])
def test_bytes_on_disk_end_exactly_at_their_limit(service: Service, count: int, place: str) -> None:
    code = f"""
assert {4 * MIB} - 65536 <= free <= {4 * MIB}
print(write("{place}", free - 4096) == ("written", free - 4096)); os.unlink("{place}")
print(write("{place}", free) == ("written", free), write("{place}2", 1)); os.unlink("{place}")
print(write("{place}", free + 1) == ("ENOSPC", free)); os.unlink("{place}")
print(write("{place}", 100 * free) == ("ENOSPC", free)); os.unlink("{place}")
file = os.open("{place}", os.O_CREAT | os.O_WRONLY)
print(tried(os.truncate, file, {4 * MIB}), tried(os.truncate, file, {4 * MIB + 1}))
print(tried(os.pwrite, file, b"x", 1 << 40), tried(os.posix_fallocate, file, 0, 1 << 40))
"""
    wanted = "True\nTrue ('ENOSPC', 0)\nTrue\nTrue\nallowed EFBIG\nEFBIG EFBIG\n"
    limits = Limits(disk_bytes=4 * MIB)
    ignored = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    assert printed(service, count, ignored + WRITE + code, limits) == wanted


@neighbours
def test_the_number_of_files_ends_exactly_at_its_limit(service: Service, count: int) -> None:
    code = """
free, made = os.statvfs("/box").f_ffree, 0
try:
    while made < 10 * free:
        os.close(os.open(f"/tmp/{made}", os.O_CREAT | os.O_WRONLY))
        made += 1
except OSError as error:
    print(errno.errorcode[error.errno], made == free, 1000 < free <= 1024)
print(tried(os.mkdir, "d"), tried(os.symlink, "x", "l"), tried(os.mkfifo, "p"))
os.unlink("/tmp/0")
print(tried(os.mkdir, "d"), tried(os.mkdir, "e"))
"""
    wanted = "ENOSPC True True\nENOSPC ENOSPC ENOSPC\nallowed ENOSPC\n"
    assert printed(service, count, code, Limits(disk_bytes=4 * MIB)) == wanted


# Descriptors ----------------------------------------------------------------------------------


@neighbours
def test_descriptors_end_at_their_number(service: Service, count: int) -> None:
    code = """
opened = []
try:
    while len(opened) < 5000:
        opened.append(os.dup(0))
except OSError as error:
    print(errno.errorcode[error.errno], len(opened), opened[-1])
print(tried(os.pipe), tried(socket.socket), tried(open, "/dev/null"))
os.close(opened.pop())
print(tried(os.open, "/dev/null", 0), tried(os.dup2, 0, 1 << 20))
"""
    wanted = "EMFILE 1021 1023\nEMFILE EMFILE EMFILE\nallowed EBADF\n"
    assert printed(service, count, code, Limits()) == wanted


# Output ---------------------------------------------------------------------------------------

KEPT = 1000


@neighbours
@pytest.mark.parametrize("stream", [1, 2])
def test_output_is_kept_up_to_its_limit(service: Service, count: int, stream: int) -> None:
    for size in (0, KEPT - 1, KEPT):
        for result in runs(service, count, _writes(stream, size), Limits(output_bytes=KEPT)):
            text, truncated = _stream(result, stream)
            assert (result.outcome, text, truncated) == ("ok", "x" * size, False)


@neighbours
@pytest.mark.parametrize("size", [KEPT + 1, 5_000_000], ids=["just beyond", "far beyond"])
def test_output_beyond_its_limit_is_cut_and_says_so(
    service: Service, count: int, size: int
) -> None:
    for stream in (1, 2):
        for result in runs(service, count, _writes(stream, size), Limits(output_bytes=KEPT)):
            text, truncated = _stream(result, stream)
            assert (result.outcome, truncated) == ("ok", True), result
            assert text.count("x") == KEPT
            assert f"[... {size - KEPT} bytes dropped ...]" in text
            assert _stream(result, 3 - stream) == ("", False)


@neighbours
def test_output_beyond_its_limit_can_be_made_an_end(service: Service, count: int) -> None:
    limits = Limits(output_bytes=KEPT)
    for result in runs(service, count, _writes(1, KEPT), limits, on_output_limit="stop"):
        assert (result.outcome, len(result.stdout)) == ("ok", KEPT)
    endless = "while True: os.write(1, b'x' * 4096)"
    for result in runs(service, count, endless, limits, on_output_limit="stop"):
        assert (result.outcome, result.stdout_truncated) == ("output_limit", True), result
        assert str(KEPT) in result.message


def _writes(stream: int, size: int) -> str:
    return f"left = {size}\nwhile left: left -= os.write({stream}, b'x' * min(left, 65536))"


def _stream(result: rollyard.RunResult, stream: int) -> tuple[str, bool]:
    if stream == 1:
        return result.stdout, result.stdout_truncated
    return result.stderr, result.stderr_truncated


# The server's maximum ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        Limits(timeout_s=3600), Limits(memory_bytes=1 << 40),
        Limits(disk_bytes=1 << 40), Limits(pids=4096), Limits(output_bytes=64 * MIB),
    ],
    ids=lambda limits: next(iter(limits.model_fields_set)),
)  # fmt: skip
def test_a_limit_above_the_servers_maximum_is_refused_and_named(
    service: Service, limits: Limits
) -> None:
    (name,) = limits.model_fields_set
    with pytest.raises(rollyard.BadRequest, match=name):
        service.client.run("print(1)", limits=limits)
