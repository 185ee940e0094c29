"""Objects of a template that forks share without writing to them.

CPython counts references in the object itself, so merely using a preloaded function copies its
page in every fork. An immortal object's count is never written (PEP 683, which names this use);
here all that a template has loaded becomes immortal. Measured: 40 of 215 copied pages of a bare
``print``, 1,060 of 2,690 of a sympy integral. A program can tell by ``sys.getrefcount`` of what it
did not make, and by destructors of such objects, which never run: their process ends first.
"""

import builtins
import ctypes
import gc
import sys
import types
from collections.abc import Iterable

_MANY = 1000


def make_immortal() -> int:
    """Make everything reachable immortal; return how many objects became so.

    Nothing is done where this interpreter's immortal objects do not look as expected (Python 3.12
    and 3.13 have 32 bits of ones; other versions will need their own).
    """
    count_of = ctypes.c_uint32.from_address
    immortal = 0xFFFFFFFF
    if any(count_of(id(known)).value != immortal for known in (None, True, "", 0)):
        return 0
    found = 0
    waiting: list[object] = [sys.modules, vars(builtins), *gc.get_objects()]
    while waiting:
        fresh: list[object] = []
        for one in waiting:
            count = count_of(id(one))
            if count.value != immortal:
                count.value = immortal
                fresh.append(one)
        found += len(fresh)
        waiting = [inner for inner in _referents(fresh) if count_of(id(inner)).value != immortal]
    return found


def _referents(objects: list[object]) -> Iterable[object]:
    for start in range(0, len(objects), _MANY):
        yield from gc.get_referents(*objects[start : start + _MANY])
    for one in objects:
        if isinstance(one, types.CodeType):  # not known to the garbage collector
            yield from (one.co_consts, one.co_names, one.co_filename, one.co_name, one.co_qualname)
