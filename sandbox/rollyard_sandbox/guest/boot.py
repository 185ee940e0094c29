"""The jail's start: what the interpreter's command line calls.

A program runs at the bottom of the stack, as CPython's own main module does, so that recursion
depth and stack traces are the program's: in the forked child everything above is unwound first.
"""

import importlib
import sys
from collections.abc import Callable

from . import hooks

STARTUP_MODULES = frozenset(sys.modules)
"""What any interpreter has imported before its main module, and this package."""


def main(template: str) -> Callable[[], None]:
    """Serve as a template; return only in a forked child, with the program to call."""
    hooks.collect()
    # Imported late, so that what the standard library registers for fork and exit is collected.
    become = importlib.import_module(".child", __package__).Become
    try:
        importlib.import_module(".template", __package__).main(template)
    except become as forked:
        return forked.program
    raise SystemExit(0)
