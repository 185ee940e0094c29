"""All ways into the service say the same of the same programs."""

import asyncio

from rollyard_loadtest.dialects import measure


def test_verdicts_do_not_depend_on_the_dialect(endpoint: str) -> None:
    assert asyncio.run(measure(endpoint, runs=100, at_once=16)) == 0
