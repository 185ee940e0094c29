"""The trainer's tests run where torch is (scripts/setup-trainer); the service, in its own Python.

They meet over HTTP, as they do when deployed.
"""

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The environment of the service has no torch: scripts/test runs these files in .venv-trainer.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small gain nothing from a second thread, and lose much on a busy machine."""
    import torch  # pyright: ignore

    torch.set_num_threads(1)  # pyright: ignore


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Address of a real service."""
    command = [ROOT / ".venv/bin/rollyard", "up", "--port", "0", "--slots", "4"]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert up.stdout is not None
        said: list[str] = []
        for line in up.stdout:
            said.append(line)
            if "is ready at " in line:
                yield line.partition("is ready at ")[2].split()[0]
                break
        else:
            pytest.fail("the service did not start:\n" + "".join(said))
    finally:
        up.terminate()
        up.communicate(timeout=60)
