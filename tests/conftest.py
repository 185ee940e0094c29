"""Two real services for the whole session: tests/cases and tests/security share them.

They start when the first test asks; where several processes test side by side, each has its own.
Other tests start what they need themselves.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from live_service import Service

# Started in the background by a script, this process ignores Ctrl-C, and so would all that tests
# start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# live_service needs the service's packages; the SDK's tests also run where these cannot be had.

SLOTS = 32
LONGEST = (
    "e2e/test_bench.py", "cases/test_cases.py", "cases/test_faults.py",
    "security/test_leaks_many.py", "integration/test_soak.py", "integration/test_plan_measures.py",
    "integration/test_chaos.py", "integration/test_limits.py", "e2e/test_up.py", "e2e/test_cli.py",
)  # fmt: skip
"""Files that take half a minute or more, the longest first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side, the longest files come first: no process is left with one at the end."""
    if hasattr(config, "workerinput"):  # one of the processes of pytest-xdist
        turns = {Path(__file__).parent / name: turn for turn, name in enumerate(LONGEST)}
        assert all(map(Path.exists, turns)), "a file of LONGEST is not there"
        items.sort(key=lambda item: turns.get(item.path, len(turns)))


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
