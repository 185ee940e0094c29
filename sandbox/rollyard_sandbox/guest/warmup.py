"""What each template imports and exercises before it starts to fork."""

import importlib
import io
from collections.abc import Callable
from typing import Any

# What rollouts import most and what is light. Each extension module adds five mappings and each
# megabyte 250 pages to every fork: with asyncio, unittest, multiprocessing, logging, subprocess
# and hashlib as well, a bare fork cost 3.0 ms of CPU instead of 1.6. A run imports those itself.
_STANDARD = (
    "abc", "bisect", "cmath", "collections", "collections.abc", "contextlib", "copy",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq", "io",
    "itertools", "json", "linecache", "math", "numbers", "operator", "os", "random", "re",
    "statistics", "string", "sys", "textwrap", "threading", "time", "traceback", "types",
    "typing", "warnings",
)  # fmt: skip

_SCIENCE = (
    "numpy", "numpy.random", "numpy.linalg", "numpy.fft", "scipy", "scipy.linalg", "scipy.special",
    "scipy.optimize", "scipy.integrate", "scipy.sparse", "scipy.stats", "sympy", "sympy.abc",
    "pandas", "networkx",
)  # fmt: skip

_PLOT = ("matplotlib", "matplotlib.pyplot", "matplotlib.font_manager", "rollyard_figures")

MODULES: dict[str, tuple[str, ...]] = {
    "fresh": (),
    "bare": _STANDARD,
    "science": _STANDARD + _SCIENCE,
    "plot": _STANDARD + _SCIENCE + _PLOT,
}


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


def _figure() -> None:
    # The first figure builds the list of fonts, about a second of CPU.
    plt: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots()
    axes.plot([1, 2, 3], label="x")
    axes.set_title("warm")
    axes.legend()
    figure.canvas.draw()
    figure.savefig(io.BytesIO(), format="png")
    plt.close("all")


EXERCISES: dict[str, tuple[Callable[[], object], ...]] = {
    "fresh": (),
    "bare": (_plain,),
    "science": (_plain, _numpy, _sympy, _pandas, _networkx),
    "plot": (_plain, _numpy, _pandas, _figure),
}
