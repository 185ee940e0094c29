"""The forked process in which one program runs, from fork to exit.

Protects against: the program seeing anything but a fresh interpreter that was started with its
file. Does not protect anything else: whatever is in this process belongs to the program, so
nothing here decides how the run ended (the slot's PID 1 does, from outside).
"""

# The standard library's private state is this module's subject; its stubs do not describe it.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import ast
import gc
import io
import mmap
import os
import random
import resource
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any, NamedTuple, NoReturn

from . import box, hooks, kernel
from .boot import STARTUP_MODULES
from .protocol import BEGUN

# Kept here because the program may replace them; it can still kill its own exit, and only that.
_exit, _getpid, _kill = os._exit, os.getpid, os.kill
_exec, _eval, _compile = exec, eval, compile
_MERSENNE_WORDS = 624
_REHEARSALS = 20
# Words without which a last collection of cycles could change nothing that anyone sees.
_MAY_MATTER_AT_EXIT = (b"__del__", b"weakref", b"open", b"yield", b"finally", b"async")
_OOM_FIRST = b"1000"  # the kernel's out-of-memory killer takes the program, never its PID 1

ENVIRONMENT = {
    "PATH": "/opt/python/bin:/usr/bin:/bin",
    "HOME": box.WORK,
    "USER": "runner",
    "LOGNAME": "runner",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONIOENCODING": "utf-8:strict",
    "MPLBACKEND": "module://rollyard_figures",
    # One thread each: a run has one core's share, and pools would break fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}


class Limits(NamedTuple):
    """What a program's own process is limited to; the rest is its control group's."""

    disk_bytes: int
    data_bytes: int
    """Private memory of each process beyond the template's; 0: a control group limits it."""
    pids: int


def confine(limits: Limits, uid: int, streams: list[int]) -> None:
    """Become the program's user with its limits and nothing of PID 1's.

    Order matters: what needs privilege comes before the user changes.
    """
    os.setsid()
    for target, source in enumerate(streams):
        os.dup2(source, target, inheritable=True)
    os.closerange(3, 1 << 30)
    adjust = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(adjust, _OOM_FIRST)
    os.close(adjust)
    if limits.data_bytes:
        data = limits.data_bytes + _data_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.disk_bytes, limits.disk_bytes))
    resource.setrlimit(resource.RLIMIT_NPROC, (limits.pids, limits.pids))
    os.umask(0o022)
    os.setgroups(())
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # The change of user made /proc/self unreadable; other programs in the slot are the same
    # user anyway, and the filter refuses tracing.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    os.chdir(box.WORK)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _data_bytes() -> int:
    """Private memory that this process has mapped already: the template's."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * mmap.PAGESIZE


class Become(BaseException):
    """Unwinds a forked child to the bottom of its stack, where ``program`` is called."""

    def __init__(self, program: Callable[[], NoReturn]) -> None:
        super().__init__()
        self.program = program


def become(job: dict[str, Any], begun: mmap.mmap) -> NoReturn:
    """Make ready to run the program as ``python main.py`` would; raises Become.

    ``begun`` is shared with PID 1: set when all is ready, and unmapped before the program's first
    line. A process that ends before is our fault, and the program cannot claim to be one.
    """
    source = job["code"].encode()
    files, echo = job["files"], job["echo_last"]
    if files:
        _forget_modules(files)
    thorough = bool(files) or any(word in source for word in _MAY_MATTER_AT_EXIT)

    def program() -> NoReturn:
        namespace = _fresh_main()
        hooks.restore()
        _reseed()
        gc.enable()
        begun[0] = BEGUN
        begun.close()
        exit_code: int | None = 0
        try:
            if echo:
                _execute_echoing(source, namespace)
            else:
                _exec(_compile(source, box.MAIN, "exec", dont_inherit=True), namespace)
        except SystemExit as stop:
            exit_code = _exit_code(stop)
        except BaseException as error:
            exit_code = None if type(error) is KeyboardInterrupt else 1
            _show(error)
        sys.settrace(None)
        sys.setprofile(None)
        del namespace
        _leave(exit_code, thorough=thorough)

    raise Become(program)


def _forget_modules(files: dict[str, Any]) -> None:
    """Let the request's own modules win over preloaded ones, as in a new interpreter."""
    own = {path.split("/")[0].removesuffix(".py") for path in files}
    for name in list(sys.modules):
        if name.split(".")[0] in own and name not in STARTUP_MODULES:
            del sys.modules[name]


def _fresh_main() -> dict[str, object]:
    module = types.ModuleType("__main__")
    namespace = module.__dict__
    namespace["__loader__"] = SourceFileLoader("__main__", box.MAIN)
    namespace["__annotations__"] = {}
    namespace["__file__"] = box.MAIN
    namespace["__cached__"] = None
    namespace["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    sys.orig_argv = ["python3", "main.py"]
    sys.path.insert(0, box.WORK)
    return namespace


def _reseed() -> None:
    """Give this run random numbers of its own: all forks share the template's state."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        # The whole Mersenne state from the kernel: 10 µs, where seed() takes 430.
        words = numpy.frombuffer(os.urandom(4 * _MERSENNE_WORDS), dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", words, _MERSENNE_WORDS))


def _show(error: BaseException) -> None:
    """Report an uncaught exception as CPython does, through sys.excepthook."""
    error.__traceback__ = _without_our_frames(error.__traceback__)
    sys.last_exc = error
    try:
        hook = sys.excepthook
    except AttributeError:
        sys.stderr.write("sys.excepthook is missing\n")
        hook = sys.__excepthook__
    try:
        hook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as failure:
        sys.stderr.write("Error in sys.excepthook:\n")
        failure.__traceback__ = _without_our_frames(failure.__traceback__)
        failure.__context__ = None
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def _without_our_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """From the program's module on; nothing where the code did not compile."""
    while trace is not None and trace.tb_frame.f_code.co_filename != box.MAIN:
        trace = trace.tb_next
    return trace


def _execute_echoing(code: bytes, namespace: dict[str, object]) -> None:
    """As a notebook cell: the value of a last expression is shown unless it is None."""
    tree = ast.parse(code, box.MAIN)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    _exec(_compile(tree, box.MAIN, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        shown = ast.Expression(last.value)
        sys.displayhook(_eval(_compile(shown, box.MAIN, "eval", dont_inherit=True), namespace))


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        # CPython truncates to C long, the kernel to eight bits; out of range is -1.
        return stop.code & 0xFF if -(1 << 63) <= stop.code < 1 << 63 else 0xFF
    print(stop.code, file=sys.stderr)  # noqa: T201 - as CPython does
    return 1


def _leave(exit_code: int | None, *, thorough: bool) -> NoReturn:
    """What Py_FinalizeEx does that a program can see, without tearing down shared libraries."""
    try:
        if len(threading._active) > 1:
            threading._shutdown()  # waits for the program's threads
        hooks.run_exit_callbacks()
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
    flushed = _flush()
    _drop_main(thorough)
    flushed = _flush() and flushed
    if exit_code is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _kill(_getpid(), signal.SIGINT)
    if not flushed and exit_code == 0:
        exit_code = 120  # Py_RunMain's code for output that could not be written
    _exit(130 if exit_code is None else exit_code)


def _flush() -> bool:
    done = True
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)  # a program may have deleted it
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException as error:
            if name == "stdout":
                done = False
                _write_unraisable(error)
    return done


def _write_unraisable(error: BaseException) -> None:
    try:
        text = f"Exception ignored in: <stdout>\n{type(error).__name__}: {error}\n"
        os.write(2, text.encode("utf-8", "replace"))
    except OSError:
        return


def _drop_main(thorough: bool) -> None:
    """Let go of the program's module, and so run destructors with its globals still in place.

    What survives even the collection of cycles is set to None, name by name (finalize_modules).
    """
    try:
        main = sys.modules.pop("__main__", None)
        survivor = weakref.ref(main) if main is not None else None
        del main
        if thorough:
            gc.collect()
        if survivor is not None and (left := survivor()) is not None:
            names = vars(left)
            for name in list(names):
                if name != "__builtins__":
                    names[name] = None
    except BaseException:
        return  # a program that breaks its own teardown has already said all it will


def rehearse() -> None:
    """Run this module's own code until the interpreter has specialised it, in the template.

    Specialised instructions do not count their executions, so each fork finds them warm and
    copies fewer pages.
    """
    argv, orig_argv, path = sys.argv, sys.orig_argv, list(sys.path)
    main = sys.modules["__main__"]
    for _ in range(_REHEARSALS):
        namespace = _fresh_main()
        _exec(_compile(b"x = 1", box.MAIN, "exec", dont_inherit=True), namespace)
        _reseed()
        _flush()
        _drop_main(thorough=False)
    sys.argv, sys.orig_argv, sys.path[:] = argv, orig_argv, path
    sys.modules["__main__"] = main


def prepare_streams() -> None:
    """Set up text streams in the template, over pipes; forks inherit them as they are.

    Line buffered, so that what was printed before a limit struck is there to read.
    """
    for stream, errors in (
        (sys.stdin, "strict"),
        (sys.stdout, "strict"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            buffered = stream is sys.stdin
            stream.reconfigure(encoding="utf-8", errors=errors, line_buffering=not buffered)
