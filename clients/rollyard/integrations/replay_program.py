"""Runs the cells of a notebook inside the jail: all but the last one silently, and the last.

``notebook`` sends this file as a program, with one call appended: ``replay(…)``. Standard library
only. Earlier cells print nothing and their exceptions are swallowed, as they were shown before.
"""

# pyright: basic
# User code's objects pass through here; nothing is known of their types.

import ast
import builtins
import contextlib
import json
import linecache
import os
import sys
import traceback
import types
from pathlib import Path


class Answered(BaseException):
    """The program gave its answer, and is over."""


def replay(cells, call="", answer_path=""):
    """Run all cells in one namespace, as ``__main__``; the value of the last one is shown.

    Args:
        cells: Source text of each.
        call: Name of a function, for the cells to call, that ends the program; its argument is
            the answer. Empty: there is none.
        answer_path: File for the answer, or the value of the last expression, as JSON.
    """
    answer_file = Path(answer_path).absolute()  # a cell may change the directory
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    namespace = main.__dict__
    namespace["__builtins__"] = builtins
    *earlier, last = cells

    def answered(answer=None):
        write(answer_file, {"final": True}, answer)
        raise Answered

    if call:
        namespace[call] = answered
    with silence():
        for number, source in enumerate(earlier, 1):
            with contextlib.suppress(BaseException):
                evaluate(source, f"<cell {number}>", namespace)
    try:
        value = evaluate(last, f"<cell {len(cells)}>", namespace)
    except Answered:
        return
    except Exception as error:
        complain(error)
        sys.exit(1)
    if answer_path:
        write(answer_file, {"final": False}, value)
    elif value is not None:
        sys.stdout.write(f"{value!r}\n")


def complain(error):
    """Print a traceback without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.stdout.flush()
    traceback.print_exception(type(error), error, trace)


@contextlib.contextmanager
def silence():
    """Nothing is printed within the block, by nobody: the descriptors lead nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


def evaluate(source, filename, namespace):
    """Execute a cell; return the value of its last expression, or None."""
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    tree = ast.parse(source, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, filename, "exec", dont_inherit=True), namespace)  # noqa: S102
    if last is None:
        return None
    return eval(compile(last, filename, "eval", dont_inherit=True), namespace)  # noqa: S307


def write(path, what, value):
    """An answer as JSON, or as its text where JSON cannot have it."""
    try:
        text = json.dumps({**what, "value": value})
    except (TypeError, ValueError, RecursionError):
        text = json.dumps({**what, "value": repr(value)})
    path.write_text(text, encoding="utf-8")
