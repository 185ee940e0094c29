"""When a run is answered, nothing of it lives: not on the host, not in its slot."""

import time

import pytest
from aftermath import Before, faults
from live_service import Service
from programs import named, run
from requirements import requirement

from rollyard.types import Limits

HIDING = named(
    r"""
## a forked child
if os.fork() == 0: time.sleep(600)
## a child in its own session
if os.fork() == 0:
    os.setsid(); time.sleep(600)
## a daemon
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 9); time.sleep(600)
    os._exit(0)
os.wait()
## grandchildren
for _ in range(3):
    if os.fork() == 0:
        for _ in range(3):
            if os.fork() == 0: break
        time.sleep(600)
## a stopped child
if os.fork() == 0: os.kill(os.getpid(), 19)
time.sleep(0.05)
## a child that ignores all
import signal
if os.fork() == 0:
    signal.pthread_sigmask(0, range(1, 65))
    while True: pass
## children that fork on
for _ in range(8):
    try:
        child = os.fork()
    except OSError:  # the others are as many as there may be
        break
    while child == 0:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
time.sleep(0.1)
## a program executed
os.spawnv(os.P_NOWAIT, '/bin/sleep', ['sleep', '600'])
## a traced child
if os.fork() == 0:
    print(libc.ptrace(0, 0, 0, 0)); os.kill(os.getpid(), 19)
time.sleep(0.05)
## threads
import threading
for _ in range(9): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
## a child that holds the pipes
if os.fork() == 0:
    while True:
        os.write(1, b'.')
        time.sleep(0.001)
## a listener
s = socket.socket(socket.AF_UNIX); s.bind('\0name'); s.listen()
t = socket.create_server(('127.0.0.1', 0))
if os.fork() == 0: s.accept()
## a lock
import fcntl
f = open(os.__file__); fcntl.flock(f, 2)
if os.fork() == 0: time.sleep(600)
## a timer
import signal
signal.setitimer(signal.ITIMER_REAL, 0.2)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
"""
)
CONDITIONS = (
    "no_process_left",
    "no_cgroup_left",
    "no_tmp_left",
    "no_listener_left",
    "next_call_ok",
    "redis_clean",
    "pids_stable",
    "fds_stable",
)


@requirement("end.kill_all")
@pytest.mark.parametrize("name", HIDING)
def test_nothing_lives_on(service: Service, name: str) -> None:
    before = Before.of(service)
    began = time.monotonic()
    result = run(service, HIDING[name], Limits(timeout_s=10))
    assert result.outcome == "ok", result
    assert time.monotonic() - began < 5, "it was waited for"
    assert faults(before, CONDITIONS) == []


@requirement("end.kill_all")
@pytest.mark.parametrize("name", HIDING)
def test_nothing_lives_on_after_a_limit(service: Service, name: str) -> None:
    before = Before.of(service)
    code = HIDING[name] + "\nprint('begun')\nwhile True: time.sleep(1)"
    assert run(service, code, Limits(timeout_s=0.5)).outcome == "timeout"
    assert faults(before, CONDITIONS) == []
