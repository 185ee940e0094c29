"""Runs the cells of a notebook one after another in one interpreter, inside the jail.

The gateway sends this file as a program, with one call appended: ``run_cells(…)``. Standard
library only. What a cell prints goes out as it is; in between stand marks, a token and a JSON
object in one line, that say which cell began, what it showed and how it failed. The token is
new in each run: a program that looks it up can garble its own cells, and nothing else.
"""

# pyright: basic
# User code's objects pass through here; nothing is known of their types.

import ast
import base64
import builtins
import contextlib
import json
import linecache
import os
import signal
import sys
import traceback
import types

_write = os.write
_MIME = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
}


class CellTimeout(BaseException):
    """A cell ran longer than the time given to each."""


class Marks:
    """Writes marks between what the cells print."""

    def __init__(self, token):
        self._token = token
        self.cell = 0

    def begin(self, cell):
        self._both({"cell": cell})
        self.cell = cell

    def end(self, cells):
        self._both({"cell": cells, "end": True})

    def _both(self, what):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for descriptor in (1, 2):
            self._put(descriptor, what)

    def say(self, **what):
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self._put(1, {"cell": self.cell, **what})

    def _put(self, descriptor, what):
        data = f"{self._token}{json.dumps(what)}\n".encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):  # the program closed it: its loss
            while data:
                data = data[_write(descriptor, data) :]


def bundle(value):
    """What a notebook shows of a value: MIME type to text."""
    shown = {"text/plain": repr(value)}
    for name, mime in _MIME.items():
        method = getattr(type(value), name, None)
        if method is None:
            continue
        with contextlib.suppress(Exception):
            made = method(value)
            if isinstance(made, bytes):
                made = base64.b64encode(made).decode()
            if made is not None:
                json.dumps(made)
                shown[mime] = made
    return shown


def compiled(source, filename):
    """The statements of a cell, and its last expression apart (or None)."""
    tree = ast.parse(source, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    body = compile(tree, filename, "exec", flags, dont_inherit=True)
    return body, last and compile(last, filename, "eval", flags, dont_inherit=True)


def evaluate(code, namespace, loop):
    """Execute code; awaits of a cell's top level run in one loop for all cells."""
    value = eval(code, namespace)  # noqa: S307 - what it is for
    if isinstance(value, types.CoroutineType) and code.co_flags & 0x80:
        return loop().run(value)
    return value


def failure(error, filename):
    """An error in a notebook's words, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    return {
        "ename": type(error).__name__,
        "evalue": str(error),
        "traceback": traceback.format_exception(type(error), error, trace),
    }


def expire(*_):
    raise CellTimeout("the cell ran longer than cell_timeout")


def run_cells(token, cells, cell_timeout_s=0.0, environment=None):
    """Run all cells; one that fails does not stop those after it."""
    os.environ.update(environment or {})
    marks = Marks(token)
    runner = []

    def loop():
        import asyncio

        if not runner:
            runner.append(asyncio.Runner())
        return runner[0]

    def display(*values):
        for value in values:
            marks.say(display=bundle(value))

    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    namespace = main.__dict__
    namespace.update(__builtins__=builtins, display=display)
    signal.signal(signal.SIGALRM, expire)
    for number, source in enumerate(cells):
        marks.begin(number)
        filename = f"<cell {number + 1}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        try:
            signal.setitimer(signal.ITIMER_REAL, cell_timeout_s)
            try:
                body, last = compiled(source, filename)
                evaluate(body, namespace, loop)
                value = evaluate(last, namespace, loop) if last else None
                if value is not None:
                    marks.say(result=bundle(value))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            marks.say(error=failure(error, filename))
    if runner:
        runner[0].close()
    marks.end(len(cells))
