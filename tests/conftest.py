"""Two real services for the whole session: tests/cases and tests/security share them.

They start when the first test asks. Other tests start what they need themselves.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from live_service import Service

# live_service needs the service's packages; the SDK's tests also run where these cannot be had.

SLOTS = 32


@pytest.fixture(scope="session")
def placed() -> Iterator[None]:
    """What no program may see or touch is in place."""
    from live_service import canaries

    with canaries():
        yield


@pytest.fixture(scope="session")
def service(placed: None) -> "Iterator[Service]":
    """Many slots: for runs side by side."""
    from live_service import serve

    with serve("shared", slots=SLOTS) as started:
        yield started


@pytest.fixture(scope="session")
def one_slot(placed: None) -> "Iterator[Service]":
    """One slot: each run comes after the one before, in the same place."""
    from live_service import serve

    with serve("single", slots=1) as started:
        yield started
