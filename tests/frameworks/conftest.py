"""The integrations against the frameworks' own classes; run by ``scripts/test-frameworks``.

Not part of ``scripts/test``: the frameworks are large. Some need a GPU stack to be imported as a
whole; of those the module with the class is loaded alone, past its package's ``__init__``.
"""

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollyard.local import local


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Address of a service, which is the default of all clients too."""
    service = local(slots=16, templates=["bare"])
    with service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLYARD_URL", service.address)
        yield service.address


@pytest.fixture(scope="session")
def http_url(url: str) -> Iterator[str]:
    """One more gateway of the service, on TCP: for clients that know no Unix sockets."""
    queue = Path(url.removeprefix("unix://")).with_name("valkey.sock")
    command = [sys.executable, "-P", "-m", "rollyard_service", "--port", "0"]
    with subprocess.Popen(
        [*command, "--redis-url", f"unix://{queue}"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            yield json.loads(process.stderr.readline())["address"]
        finally:
            process.terminate()
            process.communicate()


def load_past_init(*packages: str) -> None:
    """Make packages importable without running their ``__init__``."""
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(_directory(name))]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _directory(package: str) -> Path:
    top, *rest = package.split(".")
    for entry in sys.path:
        if (found := Path(entry, top, *rest)).is_dir():
            return found
    raise ModuleNotFoundError(package)
