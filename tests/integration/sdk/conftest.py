from collections.abc import Iterator

import pytest

from .peer import Peer, Serving


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Serving(Peer()) as serving:
        yield serving


@pytest.fixture(params=["httpx2", "aiohttp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param
