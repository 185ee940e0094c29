"""Services that the security tests share; those that kill parts of one start their own."""

from collections.abc import Iterator

import pytest
from live_service import Service, canaries, serve


@pytest.fixture(scope="session")
def placed() -> Iterator[None]:
    with canaries():
        yield


@pytest.fixture(scope="session")
def service(placed: None) -> Iterator[Service]:
    with serve("security", slots=16) as started:
        yield started


@pytest.fixture(scope="session")
def one_slot(placed: None) -> Iterator[Service]:
    with serve("leaks", slots=1) as started:
        yield started
