"""What libraries hook into fork and exit, kept aside so that a run pays only for what it uses.

Preloaded libraries register functions that every fork and every exit would call: measured, 155 of
a fork's 290 page faults and a quarter of a small program's CPU. A template has no thread, no held
lock and no handler, so at our own forks there is nothing for them to do. In the program they are
back in place before its first line: its own forks and its own exit behave as usual.
"""

# The standard library's private state is this module's subject; its stubs do not describe it.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

type Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]

_fork_hooks: list[dict[str, Callable[[], object]]] = []
_exit_calls: list[Call] = []
_register_at_fork = os.register_at_fork
_register_at_exit = atexit.register
_callbacks_registered: Callable[[], int] = atexit._ncallbacks
_run_registered: Callable[[], None] = atexit._run_exitfuncs


def collect() -> None:
    """From here on, keep what is registered aside.

    The jail's start line calls it before anything else is imported, this package included.
    """

    def at_fork(**functions: Callable[[], object]) -> None:
        _fork_hooks.append(functions)

    def at_exit(function: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
        _exit_calls.append((function, args, kwargs))
        return function

    os.register_at_fork = at_fork
    atexit.register = at_exit


def end_collection() -> None:
    """Put the real functions back; what was collected stays aside.

    Hooks that drop what a fork must not share are called once here: matplotlib's closes its font
    files, whose descriptors a program does not get.
    """
    os.register_at_fork = _register_at_fork
    atexit.register = _register_at_exit
    for after in _hooks_that_matter():
        after()


def restore() -> None:
    """In the program's process: do what matters of the fork that made it, and hook the next."""
    for after in _hooks_that_matter():
        after()
    for functions in _fork_hooks:
        _register_at_fork(**functions)
    # The one thing that the skipped hook would have done which a program can see.
    sys.modules["threading"]._main_thread._native_id = os.getpid()


def _hooks_that_matter() -> list[Callable[[], object]]:
    hooks = [functions.get("after_in_child") for functions in _fork_hooks]
    return [hook for hook in hooks if hook is not None and _name(hook) not in _NOTHING_TO_DO]


def _name(function: Callable[..., object]) -> tuple[str | None, str]:
    # A functools.partial has neither.
    return getattr(function, "__module__", None), getattr(function, "__qualname__", "")


def run_exit_callbacks() -> None:
    """The program's callbacks, then those of the libraries that have something to do."""
    if _callbacks_registered():
        _run_registered()
    for function, args, kwargs in reversed(_exit_calls):
        idle = _IDLE.get(_name(function))
        if idle is None or not idle():
            function(*args, **kwargs)


def _logging_is_idle() -> bool:
    import logging

    return not logging._handlerList


def _multiprocessing_is_idle() -> bool:
    from multiprocessing import process, util

    return not process._children and not util._finalizer_registry


# At a fork of a process with one thread, no held lock and no event loop; random is reseeded anyway.
_NOTHING_TO_DO: frozenset[tuple[str | None, str]] = frozenset(
    {
        ("threading", "_after_fork"),
        ("logging", "_after_at_fork_child_reinit_locks"),
        ("asyncio.events", "on_fork"),
        ("random", "Random.seed"),
        (None, "lock._at_fork_reinit"),
    }
)
_IDLE: dict[tuple[str | None, str], Callable[[], bool]] = {
    ("logging", "shutdown"): _logging_is_idle,
    ("multiprocessing.util", "_exit_function"): _multiprocessing_is_idle,
}
