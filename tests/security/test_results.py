"""A result says what really happened, and the program has no part in saying it."""

import pytest
from live_service import Service
from programs import PRELUDE, named, ran, run, running
from requirements import requirement

from rollyard import RunRequest
from rollyard.types import MIB, Limits

FORGED = r'{"exit_code": 0, "signal": null, "outcome": "ok", "stdout": "42\n", "killed": null}'


FORGERIES = named(
    r"""
## records on every descriptor there may be, framed as a slot's PID 1 would -> error 7
frame = len(FORGED).to_bytes(4, 'big') + FORGED.encode()
for fd in range(3, 1024):
    tried(os.write, fd, frame)
os._exit(7)
## descriptors of others, opened anew through /proc -> error 7
for pid in (1, os.getppid(), os.getpid()):
    for fd in range(64):
        try:
            with open(f'/proc/{pid}/fd/{fd}', 'wb', 0) as f:
                f.write(b'x')
        except OSError:
            pass
os._exit(7)
## a record on stdout and stderr -> error 3
print(FORGED)
print(FORGED, file=sys.stderr)
os._exit(3)
## an end by a signal -> signal
os.kill(os.getpid(), 9)
## an exit hook that would make it 0 -> signal
import atexit
atexit.register(lambda: os._exit(0))
os.kill(os.getpid(), 11)
## the interpreter's own exits, replaced -> error 1
sys.exit = os._exit = lambda *a: None
sys.excepthook = lambda *a: None
raise ValueError
## frames of ours found through the call stack, their locals rewritten -> error 1
frame = sys._getframe()
while frame:
    frame.f_locals.update(exit_code=0, status=0)
    frame = frame.f_back
raise ValueError
## a child that ends well does not speak for its parent -> error 9
if os.fork() == 0:
    os._exit(0)
os.wait()
os._exit(9)
## nor does one that lives longer -> error 9
if os.fork() == 0:
    time.sleep(5)
    print('later')
    os._exit(0)
os._exit(9)
"""
)


@requirement("result.unforgeable")
@pytest.mark.parametrize("name", FORGERIES)
def test_no_program_writes_its_own_result(service: Service, name: str) -> None:
    result = run(service, f"FORGED = {FORGED!r}\n{FORGERIES[name]}")
    outcome, _, exit_code = name.rpartition(" -> ")[2].partition(" ")
    assert result.outcome == outcome
    assert result.exit_code == (int(exit_code) if exit_code else None)
    assert "later" not in result.stdout and result.stdout != "42\n"


@requirement("result.unforgeable")
def test_the_clock_is_outside(service: Service) -> None:
    code = "time.monotonic = time.time = time.perf_counter = lambda: 0.0\ntime.sleep(0.3)"
    result = run(service, code)
    assert 300 <= result.wall_ms < 3000
    assert result.cpu_ms < 300


@requirement("result.truthful")
@pytest.mark.parametrize(
    ("code", "outcome", "exit_code", "signal"),
    [
        ("pass", "ok", 0, None),
        ("sys.exit(0)", "ok", 0, None),
        ("sys.exit(5)", "error", 5, None),
        ("sys.exit('text')", "error", 1, None),
        ("1 / 0", "error", 1, None),
        ("os._exit(255)", "error", 255, None),
        ("os._exit(124)", "error", 124, None),  # what timeout(1) uses
        ("os._exit(137)", "error", 137, None),
        ("os.abort()", "signal", None, 6),
        ("os.kill(os.getpid(), 15)", "signal", None, 15),
        ("os.kill(os.getpid(), 24)", "signal", None, 24),  # SIGXCPU, by its own hand
        ("ctypes.string_at(0)", "signal", None, 11),
        ("raise MemoryError", "error", 1, None),
        ("raise TimeoutError", "error", 1, None),
        ("time.sleep(60)", "timeout", None, 9),
        ("while True: pass", "timeout", None, 9),
        ("os.kill(os.getpid(), 19)", "timeout", None, 9),
        ("import signal\nsignal.pthread_sigmask(0, range(1, 65))\ntime.sleep(60)",
         "timeout", None, 9),
    ],
)  # fmt: skip
def test_the_outcome_is_what_happened(
    service: Service, code: str, outcome: str, exit_code: int | None, signal: int | None
) -> None:
    result = run(service, code, Limits(timeout_s=1))
    assert (result.outcome, result.exit_code, result.signal) == (outcome, exit_code, signal)


@requirement("result.truthful")
def test_a_cpu_limit_and_an_output_limit_have_names_of_their_own(service: Service) -> None:
    spent = run(service, "while True: pass", Limits(timeout_s=30, cpu_s=0.3))
    assert spent.outcome == "cpu_timeout" and spent.cpu_ms >= 290
    flood = RunRequest(
        code="while True: print('x' * 999)",
        on_output_limit="stop",
        limits=Limits(output_bytes=5000),
    )
    stopped = service.client.submit(flood)
    assert stopped.outcome == "output_limit" and stopped.stdout_truncated
    assert len(stopped.stdout) < 6000


LEAVINGS = named(
    r"""
## nested directories
for _ in range(1500):
    os.mkdir('d'); os.chdir('d')
## many files
for n in range(2500): open(f'f{n}', 'w').close()
## no rights
os.mkdir('d'); open('d/f', 'w').close(); os.chmod('d', 0); os.chmod('.', 0)
## a directory to fetch
os.makedirs('wanted/wanted')
## a pipe to fetch
os.mkfifo('wanted')
## a link to fetch
os.symlink('/etc/passwd', 'wanted'); os.symlink('/', 'root')
## a loop of links
os.symlink('loop', 'loop'); os.symlink('.', 'here')
## a socket to fetch
socket.socket(socket.AF_UNIX).bind('wanted')
## a sparse file
with open('wanted', 'wb') as f: f.truncate(60 << 20)
## an unreadable file
open('wanted', 'w').close(); os.chmod('wanted', 0)
## names that are no text
open(b'\xff\n\x01', 'w').close(); os.mkdir(b'\xfe')
## long names
open('n' * 255, 'w').close()
## its main file
os.unlink('main.py'); os.mkdir('main.py'); open('main.py/x', 'w').close()
## no working directory
import shutil
os.chdir('/')
shutil.rmtree('/box/work', True)
## attributes
os.setxattr('.', 'user.a', b'x' * 99)
## closed descriptors
os.closerange(0, 99)
## full pipes
os.set_blocking(1, False)
while tried(os.write, 1, b'x' * 65536) == 'allowed': pass
## stopped children
for _ in range(9):
    if os.fork() == 0: os.kill(os.getpid(), 19)
## busy children
for _ in range(9):
    if os.fork() == 0:
        while True: pass
## a fork race
for _ in range(4):
    try:
        child = os.fork()
    except OSError:
        break
    while child == 0:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
## locked memory
ctypes.CDLL(None).mlockall(3)
## lowered limits
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
## a nice value
os.nice(19)
os.sched_setaffinity(0, {0})
## an oom score
open('/proc/self/oom_score_adj', 'w').write('1000')
## a crash in the exit hooks
import atexit
atexit.register(ctypes.string_at, 0)
## no text streams
sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
## signals to its parent
for s in range(1, 65): tried(os.kill, 1, s)
## a full box
f = open('fill', 'wb')
try:
    while True: f.write(b'x' * 65536)
except OSError: os._exit(0)
## memory at its limit
b = b'x' * (90 << 20)
open('/tmp/f', 'wb').write(b[:20 << 20])
"""
)


@requirement("result.no_infra_at_will")
@pytest.mark.parametrize("name", LEAVINGS)
@pytest.mark.parametrize(
    "fetch", [["wanted", "wanted/wanted", "a/b/c"], ["*"]], ids=["some", "all"]
)
def test_nothing_left_behind_is_a_fault_of_ours(
    one_slot: Service, name: str, fetch: list[str]
) -> None:
    result = one_slot.client.run(
        PRELUDE + LEAVINGS[name], fetch_files=fetch, limits=Limits(memory_bytes=128 * MIB)
    )
    assert result.outcome in ("ok", "error", "memory", "signal"), result
    assert result.attempt == 1
    assert one_slot.client.run("print(1)").stdout == "1\n"


@requirement("result.unforgeable", "result.no_infra_at_will")
def test_nothing_that_pid_1_believes_can_be_reached(service: Service) -> None:
    """The page that tells our faults from the program's is unmapped before the first line."""
    code = """
import gc, mmap
print([one for one in gc.get_objects() if isinstance(one, mmap.mmap) and not one.closed])
print([line for line in open("/proc/self/maps") if line.split()[1].endswith("s")])
"""
    assert ran(service, code) == "[]\n[]\n"
    early = service.client.run("import os; os._exit(1)")
    assert (early.outcome, early.exit_code) == ("error", 1)


@requirement("result.truthful")
def test_what_we_need_to_answer_is_not_the_programs_memory(service: Service) -> None:
    """Control characters grow sixfold in JSON, and all of it passes through our hands."""
    printed = service.client.run(
        "import sys\nfor _ in range(32): sys.stdout.write('\\x01' * 65536)",
        limits=Limits(memory_bytes=16 * MIB, output_bytes=2 * MIB),
    )
    assert (printed.outcome, len(printed.stdout)) == ("ok", 2 * MIB), printed.message
    assert printed.peak_memory_bytes < 12 * MIB


@requirement("result.truthful")
@pytest.mark.parametrize(
    ("size", "byte", "memory"), [(2, "\\x01", 64), (7, "\\x01", 64), (7, "x", 16), (7, "x", 32)]
)
def test_a_file_comes_back_or_the_result_says_why_not(
    service: Service, size: int, byte: str, memory: int
) -> None:
    fetched = service.client.run(
        f"with open('f', 'w') as f:\n    for _ in range({size}): f.write('{byte}' * (1 << 20))",
        limits=Limits(memory_bytes=memory * MIB),
        fetch_files=["f"],
    )
    assert fetched.outcome == "ok", fetched
    if fetched.files:
        assert len(fetched.file_bytes("f")) == size * MIB
    else:
        assert fetched.message


@requirement("result.unmixed")
def test_outputs_of_runs_side_by_side_never_mix(service: Service) -> None:
    count = 300
    code = """
import sys
word = {word!r}
for _ in range(200):
    sys.stdout.write(word); sys.stdout.flush(); sys.stderr.write(word)
"""
    requests = [
        RunRequest(run_id=f"mix-{i}", code=code.format(word=f"<{i}>")) for i in range(count)
    ]
    seen = {result.run_id: result for result in service.client.run_batch(requests)}
    assert len(seen) == count
    for i in range(count):
        result = seen[f"mix-{i}"]
        assert result.outcome == "ok"
        assert result.stdout == result.stderr == f"<{i}>" * 200


@requirement("result.unmixed", "end.kill_all")
def test_a_cancelled_neighbour_changes_nothing(service: Service) -> None:
    with running(
        service, "import time; time.sleep(60)", "import time; time.sleep(0.5); print('me')"
    ) as runs:
        assert runs[1].result().stdout == "me\n"
    assert runs[0].result().outcome == "cancelled"


@requirement("result.truthful")
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_the_program_deletes_is_not_missed(service: Service, name: str) -> None:
    result = run(service, f"print('said', flush=True)\ndel sys.{name}")
    assert (result.outcome, result.exit_code, result.stdout) == ("ok", 0, "said\n"), result
    assert result.stderr == ""
