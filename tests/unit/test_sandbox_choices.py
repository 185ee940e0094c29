"""Small decisions of a worker: ids, templates, requirements, and who may start."""

import asyncio

import pytest

from rollyard_sandbox import image
from rollyard_sandbox.gate import StartGate
from rollyard_sandbox.jail import IdRange, JailError, id_range
from rollyard_sandbox.pool import guess_template


@pytest.mark.parametrize(
    ("map_text", "wanted"),
    [
        ("0 0 4294967295", IdRange(100_000, 65_536)),  # the host itself
        ("0 165536 65536", IdRange(1000, 64_536)),  # a container with a namespace of its own
        ("0 1000 1\n1 100000 65536", None),  # rootless, the range does not begin at 0
        ("0 1000 1", None),
        ("0 100000 1999", None),
        ("0 0 1000\n1000 1000 1\n1001 1001 4294966294", IdRange(100_000, 65_536)),
    ],
)
def test_ids_are_a_range_that_is_nobodys(map_text: str, wanted: IdRange | None) -> None:
    if wanted is None:
        with pytest.raises(JailError, match="run the worker as root"):
            id_range(map_text)
    else:
        assert id_range(map_text) == wanted


@pytest.mark.parametrize(
    "code",
    [
        "import numpy",
        "import numpy as np",
        "from numpy import array",
        "import os, pandas",
        "from scipy.optimize import brentq",
        "import sympy.abc",
        "def f():\n    import networkx as nx",
        "\timport mpmath",
        "if 1: pass\nimport   sympy",
        "__import__('numpy')",
        'importlib.import_module( "pandas.core")',
    ],
)
def test_what_imports_a_library_gets_the_template_that_has_it(code: str) -> None:
    assert guess_template(code) == "science"


@pytest.mark.parametrize(
    "code",
    ["", "print(1)", "import os", "# import numpy", "numpy = 1", "print('import numpy')",
     "import numpyish", "import os  # and numpy", "x = 'from pandas'"],
)  # fmt: skip
def test_all_else_gets_the_light_one(code: str) -> None:
    assert guess_template(code) == "bare"


def test_science_is_pinned_and_bare_needs_nothing() -> None:
    assert image.requirements(["bare"]) == ""
    lines = image.requirements(["bare", "science"]).splitlines()
    assert lines == image.requirements(["science"]).splitlines()
    assert all("==" in line and "#" not in line for line in lines)
    names = {line.partition("==")[0] for line in lines}
    assert names >= {"numpy", "scipy", "sympy", "pandas", "networkx"}


def test_at_most_so_many_start_at_once_and_in_their_order() -> None:
    async def scenario() -> list[int]:
        gate = StartGate(2, hold_s=60)
        order: list[int] = []

        async def run(number: int) -> None:
            place = await gate.enter()
            order.append(number)
            await asyncio.sleep(0)
            place.leave()
            place.leave()  # twice is once

        first, second = await gate.enter(), await gate.enter()
        runs = [asyncio.create_task(run(number)) for number in range(6)]
        await asyncio.sleep(0)
        assert (order, gate.waiting) == ([], 6)
        first.leave()
        second.leave()
        await asyncio.gather(*runs)
        assert gate.waiting == 0
        return order

    assert asyncio.run(scenario()) == list(range(6))


def test_a_place_that_is_not_left_is_passed_on_after_a_moment() -> None:
    async def scenario() -> None:
        gate = StartGate(1, hold_s=0.01)
        await gate.enter()
        async with asyncio.timeout(5):
            await gate.enter()

    asyncio.run(scenario())


def test_what_sleeps_is_seen_soon_and_what_computes_keeps_its_place() -> None:
    async def scenario() -> None:
        gate = StartGate(2, hold_s=60)
        asleep, busy = await gate.enter(), await gate.enter()
        waiting = [asyncio.create_task(gate.enter()) for _ in range(2)]
        looked = asyncio.Event()

        def computes() -> bool:
            looked.set()
            return True

        busy.watch(computes)
        asleep.watch(lambda: False)
        async with asyncio.timeout(5):  # and not after hold_s
            await waiting[0]
            await looked.wait()
        assert gate.waiting == 1
        busy.leave()
        await waiting[1]

    asyncio.run(scenario())


def test_whoever_gives_up_waiting_takes_no_place_with_him() -> None:
    async def scenario() -> None:
        gate = StartGate(1, hold_s=60)
        place = await gate.enter()
        waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        place.leave()
        waiting[1].cancel()  # its turn came, and it leaves before it takes it
        await asyncio.gather(waiting[1], return_exceptions=True)
        async with asyncio.timeout(5):
            await waiting[2]

    asyncio.run(scenario())
