"""The programs that are measured, each with the output that it must print."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    name: str
    title: str
    code: str
    stdout: str
    template: str
    modules: tuple[str, ...]
    """What the floor imports before it forks: the same as the template that serves the program."""


_STANDARD = (
    "bisect", "cmath", "collections", "contextlib", "copy", "ctypes", "dataclasses", "datetime",
    "decimal", "fractions", "heapq", "itertools", "json", "math", "random", "re", "resource",
    "select", "signal", "socket", "statistics", "string", "textwrap", "threading", "traceback",
    "typing",
)  # fmt: skip
_SCIENCE = (
    *_STANDARD,
    "numpy",
    "scipy",
    "scipy.optimize",
    "scipy.stats",
    "sympy",
    "pandas",
    "networkx",
)

PROGRAMS = (
    Program("print", "print(1+1)", "print(1+1)\n", "2\n", "bare", _STANDARD),
    Program(
        "numpy",
        "numpy determinant",
        "import numpy as np\n"
        "a = np.arange(100.0).reshape(10, 10) + np.eye(10)\n"
        "print(round(float(np.linalg.det(a)), 3))\n",
        "-7754.0\n",
        "science",
        _SCIENCE,
    ),
    Program(
        "sympy",
        "sympy integral (warm)",
        "import sympy as sp\nx = sp.symbols('x')\nprint(sp.integrate(sp.sin(x) * sp.exp(x), x))\n",
        "exp(x)*sin(x)/2 - exp(x)*cos(x)/2\n",
        "science",
        _SCIENCE,
    ),
)
