"""One service for all dialects, with a gateway on TCP: their clients know no Unix sockets."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx2
import pytest

from rollyard.local import local

Gateway = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="session")
def gateway(_own_environment: None) -> Iterator[Gateway]:
    """Starts one more gateway of the service, with settings; yields its address."""
    service = local(slots=8).start()
    queue = Path(service.address.removeprefix("unix://")).with_name("valkey.sock")

    @contextmanager
    def started(**settings: object) -> Generator[str]:
        own = {f"ROLLYARD_{name.upper()}": str(value) for name, value in settings.items()}
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "rollyard_service", "--port", "0",
             "--redis-url", f"unix://{queue}"],
            env=os.environ | own, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                assert process.stderr is not None
                event = json.loads(process.stderr.readline())
                assert event["event"] == "gateway.listening"
                yield event["address"]
            finally:
                process.terminate()
                process.communicate()

    try:
        yield started
    finally:
        service.stop()


@pytest.fixture(scope="session")
def endpoint(gateway: Gateway) -> Iterator[str]:
    with gateway() as address:
        yield address


@pytest.fixture(scope="session")
def http(endpoint: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=endpoint, timeout=60) as client:
        yield client
