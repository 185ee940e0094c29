"""The scripts explain themselves at once, before they set anything up."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "demo", "chaos", "soak", "bench", "layers", "fuzz", "setup", "setup-trainer", "test-frameworks",
    "check-deploy",
)  # fmt: skip
# What the scripts pass their options on to.
PROGRAMS = (
    ("demo", "examples/demo.py"),
    ("chaos", "-m rollyard_loadtest.chaos"),
    ("soak", "-m rollyard_loadtest.soak"),
    ("soak", "tests/support/leak_hunt.py"),
    ("bench", "-m rollyard_loadtest.parts"),
    ("bench", "-m rollyard_loadtest.control"),
    ("layers", "tests/perf/layers.py"),
    ("fuzz", "tests/fuzz/search.py"),
)


@pytest.fixture
def bare_checkout(tmp_path: Path) -> Path:
    """The scripts where nothing is set up, nor could be: there is no pyproject.toml."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def _help(folder: Path, command: str, *arguments: str) -> str:
    done = subprocess.run(
        [command, *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_comes_before_any_set_up(bare_checkout: Path, script: str, flag: str) -> None:
    said = _help(bare_checkout, f"scripts/{script}", flag)
    assert f"Usage: scripts/{script}" in said
    assert not said.startswith("#")
    assert [path.name for path in bare_checkout.iterdir()] == ["scripts"]  # nothing was made


def test_help_comes_from_any_folder_and_after_other_arguments(bare_checkout: Path) -> None:
    said = _help(bare_checkout / "scripts", "./bench", "math-rollout", "--help")
    assert "Usage: scripts/bench" in said
    assert [path.name for path in bare_checkout.iterdir()] == ["scripts"]


@pytest.mark.parametrize(("script", "program"), PROGRAMS)
def test_help_names_every_option(bare_checkout: Path, script: str, program: str) -> None:
    done = subprocess.run(
        [sys.executable, *program.split(), "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    options = set(re.findall(r"--[a-z][a-z-]+", done.stdout.partition("options:")[2]))
    options -= {"--help"}
    assert options
    said = _help(bare_checkout, f"scripts/{script}", "--help")
    assert options <= set(re.findall(r"--[a-z][a-z-]+", said))
