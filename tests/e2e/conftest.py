"""What the end-to-end tests share: an environment of their own, and one running service."""

import os
from collections.abc import Iterator

import pytest
from process_tree import Process, adopt_orphans, below, reap, until

import rollyard
from rollyard.local import LocalService, local


@pytest.fixture(scope="session", autouse=True)
def _own_environment() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Nothing of the developer's settings reaches these tests, and no orphan escapes them."""
    adopt_orphans()
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("ROLLYARD_") and name != "ROLLYARD_STATE_DIR":
                patch.delenv(name)
        yield


class Service:
    """A service that the tests of a module share: its client and its address."""

    def __init__(self, started: LocalService, client: rollyard.Client) -> None:
        self.client = client
        self.address = started.address
        self.pids = started.pids


@pytest.fixture(scope="module")
def service(_own_environment: None) -> Iterator[Service]:
    started = local(slots=2)
    with started as client:
        yield Service(started, client)


@pytest.fixture
def nothing_left(_own_environment: None) -> Iterator[None]:
    """Fails the test when a process that it started still runs at its end."""
    before = below(os.getpid())

    def left() -> set[Process]:
        after = below(os.getpid())
        reap({one.pid for one in after if one.parent == os.getpid()} - {p.pid for p in before})
        known = {(one.pid, one.started) for one in before}
        return {one for one in after if (one.pid, one.started) not in known}

    yield
    assert until(lambda: not left()), left()
