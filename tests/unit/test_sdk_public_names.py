"""The SDK's public surface."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import rollyard
from rollyard import errors

ROOT = Path(__file__).parents[2]
SUBMODULES = {"cli", "errors", "integrations", "local", "types"}


def test_all_is_sorted_and_is_what_is_public() -> None:
    assert rollyard.__all__ == sorted(rollyard.__all__)
    public = {name for name in vars(rollyard) if not name.startswith("_")}
    assert public - SUBMODULES | {"__version__", "local"} == set(rollyard.__all__)


def test_every_error_is_exported() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.RollyardError)
    }
    assert tree <= set(rollyard.__all__)
    assert errors.__doc__ is not None
    assert tree == set(re.findall(r"[A-Z]\w+", errors.__doc__)) & tree


def test_local_is_the_function_even_if_its_module_is_imported_first() -> None:
    script = "import rollyard.local, rollyard; assert callable(rollyard.local); print('ok')"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr


def test_import_loads_only_the_base_dependencies() -> None:
    script = "import rollyard, sys; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split())
    extras = {"aiohttp", "fastapi", "msgspec", "numpy", "redis", "rollyard_queue", "uvicorn"}
    assert "rollyard" in loaded
    assert not loaded & extras


def test_base_dependencies_are_two() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = re.findall(r"[\w-]+(?=[><=~!])", " ".join(project["dependencies"]))
    assert names == ["httpx2", "pydantic"]
