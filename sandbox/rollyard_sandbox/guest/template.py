"""A template: a warm interpreter that has imported its libraries and from then on only forks.

It is PID 1 of its nsjail, started afresh with an empty environment, so there is no secret, no
socket and no thread in it; it never runs a program's code. On request it clones a slot.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable

from . import box, child, hooks, immortal, mappings, slot, warmup

CONTROL_FD = 3
_MAX_MESSAGE_BYTES = 4096
_FRESH = "fresh"  # forks once, and that fork executes another program


def main(name: str) -> None:
    """Warm up, report, and clone slots until the worker hangs up."""
    control = socket.socket(fileno=CONTROL_FD)
    control.set_inheritable(False)
    os.closerange(CONTROL_FD + 1, 1 << 30)
    os.environ.clear()
    os.environ.update(child.ENVIRONMENT)
    child.prepare_streams()
    for folder in (box.WORK, box.TMP, box.SHM):
        os.mkdir(folder)
    missing = _import_all(warmup.MODULES[name])
    _exercise(warmup.EXERCISES[name])
    hooks.end_collection()
    child.rehearse()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:  # a fork would copy locks that no thread will ever release
        raise SystemExit(f"template {name} has {threads} threads after its imports")
    _hide_ourselves()
    gc.disable()
    gc.collect()
    if name != _FRESH:
        immortal.make_immortal()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # slots that ended need no wait()
    if name != _FRESH:
        try:
            mappings.join_libraries()
            mappings.share_written()
        except OSError as error:  # a kernel that allows none of it (vm.memfd_noexec, SELinux)
            print(f"forks will be slower: {error}", file=sys.stderr)  # noqa: T201 - the worker logs it
    control.send(json.dumps({"ready": True, "missing": missing}).encode())
    _clone_slots(control)


def _import_all(modules: tuple[str, ...]) -> list[str]:
    missing: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError:
                missing.append(module)
    return missing


def _exercise(exercises: tuple[Callable[[], object], ...]) -> None:
    """Fill the caches that first uses fill (sympy's first integral: 86 CPU-ms, then 27)."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        for exercise in exercises:
            exercise()


def _hide_ourselves() -> None:
    """Leave no trace that a program would stumble over in sys.modules and sys.path."""
    package = __name__.rpartition(".")[0]
    for module in list(sys.modules):
        if module == package or module.startswith(f"{package}."):
            del sys.modules[module]
    sys.path[:] = [entry for entry in sys.path if entry and not entry.startswith("/opt/rollyard")]


def _clone_slots(control: socket.socket) -> None:
    own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    while True:
        body, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
        if not body:
            return
        order = json.loads(body)
        # The next fork is PID 1 of a new namespace; afterwards our forks are ours again.
        os.unshare(os.CLONE_NEWPID)
        if os.fork() == 0:
            os.close(own_pid_namespace)
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            slot.main(socket.socket(fileno=descriptors[0]), order["uid"], order["disk_bytes"])
        os.setns(own_pid_namespace, os.CLONE_NEWPID)
        os.close(descriptors[0])
