"""What each template imports and exercises before it starts to fork."""

import importlib
from collections.abc import Callable
from typing import Any

# What rollouts import most; the rest of the standard library is imported by the run itself.
_STANDARD = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "bisect", "calendar", "cmath",
    "collections", "collections.abc", "concurrent.futures", "concurrent.futures.process",
    "concurrent.futures.thread", "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools",
    "json", "linecache", "locale", "logging", "math", "multiprocessing", "multiprocessing.pool",
    "numbers", "operator", "os", "pathlib", "pickle", "platform", "pprint", "queue", "random", "re",
    "secrets", "shutil", "signal", "socket", "statistics", "string", "struct", "subprocess", "sys",
    "tempfile", "textwrap", "threading", "time", "timeit", "tokenize", "traceback", "types",
    "typing", "unittest", "uuid", "warnings", "weakref", "zlib",
)  # fmt: skip

_SCIENCE = (
    "numpy", "numpy.random", "numpy.linalg", "numpy.fft", "scipy", "scipy.linalg", "scipy.special",
    "scipy.optimize", "scipy.integrate", "scipy.sparse", "scipy.stats", "sympy", "sympy.abc",
    "pandas", "networkx",
)  # fmt: skip

MODULES: dict[str, tuple[str, ...]] = {"bare": _STANDARD, "science": _STANDARD + _SCIENCE}


def _plain() -> None:
    source = "def f(n):\n    return sum(i for i in range(n))\nprint"
    exec(compile(source, "<warm-up>", "exec"), {})  # noqa: S102


def _numpy() -> None:
    np: Any = importlib.import_module("numpy")
    matrix = np.arange(9.0).reshape(3, 3) + np.eye(3)
    np.linalg.det(matrix)
    np.linalg.solve(matrix, np.ones(3))
    np.linalg.eigvals(matrix)
    str(matrix)
    np.random.default_rng().normal(size=4)


def _sympy() -> None:
    sp: Any = importlib.import_module("sympy")
    x, y = sp.symbols("x y")
    sp.integrate(sp.sin(x) * sp.exp(x), x)
    sp.integrate(x**2 / (x + 1), (x, 0, 1))
    sp.solve(x**2 - 5 * x + 6, x)
    sp.solve([x + y - 3, x - y - 1], [x, y])
    sp.factor(x**4 - 1)
    sp.simplify((x**2 - 1) / (x - 1) + sp.sin(x) ** 2 + sp.cos(x) ** 2)
    sp.diff(sp.exp(x) * sp.log(x), x)
    sp.limit(sp.sin(x) / x, x, 0)
    sp.series(sp.exp(x), x, 0, 4)
    sp.factorint(360360)
    str(sp.latex(sp.sqrt(2) / 3 + sp.pi))
    sp.Matrix([[1, 2], [3, 4]]).det()
    sp.N(sp.pi, 20)


def _pandas() -> None:
    pd: Any = importlib.import_module("pandas")
    frame = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "x"]})
    str(frame.groupby("b").a.sum())
    str(frame.describe())


def _networkx() -> None:
    nx: Any = importlib.import_module("networkx")
    nx.shortest_path(nx.path_graph(4), 0, 3)


EXERCISES: dict[str, tuple[Callable[[], object], ...]] = {
    "bare": (_plain,),
    "science": (_plain, _numpy, _sympy, _pandas, _networkx),
}
