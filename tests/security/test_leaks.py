"""One slot, one run after another: the second finds nothing of the first."""

import os

import pytest
from live_service import Service
from poisons import LOOK_ROUND, POISONS
from programs import ran, run
from requirements import requirement

from rollyard.types import Limits

SMALL = Limits(timeout_s=0.5)


@pytest.fixture(scope="module", params=["bare", "science"])
def place(request: pytest.FixtureRequest, one_slot: Service) -> tuple[str, str]:
    """A template's first line, and what a program sees in a slot that nobody used before."""
    head = "import numpy\n" if request.param == "science" else ""
    # Another template's run in the only slot destroys it: the next one is new.
    run(one_slot, "" if head else "import numpy")
    return head, ran(one_slot, head + LOOK_ROUND)


@requirement("leak.nothing")
@pytest.mark.parametrize("name", POISONS)
def test_a_later_run_sees_what_the_first_saw(
    one_slot: Service, place: tuple[str, str], name: str
) -> None:
    head, unspoilt = place
    poisoned = run(one_slot, head + POISONS[name], SMALL)
    assert not poisoned.is_infra, poisoned
    after = run(one_slot, head + LOOK_ROUND)
    assert (after.outcome, after.stderr) == ("ok", "")
    assert after.stdout == unspoilt


@requirement("leak.nothing")
def test_no_memory_of_an_earlier_run_is_left(one_slot: Service) -> None:
    """A program is a fork of the process that served the one before."""
    word = f"mark-{os.urandom(8).hex()}"
    earlier = one_slot.client.run(
        f"import os, sys  # {word}-code\n"
        f"print(sys.stdin.read() + '-out')\n"
        f"open('{word}-made', 'w').write('{word}-content')\n"
        f"os.environ['X'] = '{word}-env'\n"
        f"raise SystemExit('{word}-exit')",
        stdin=f"{word}-in",
        files={f"{word}-file": f"{word}-given"},
        fetch_files=["*"],
        run_id=f"{word}-id",
        job=f"{word}-job",
    )
    assert f"{word}-made" in earlier.files
    code = f"""
import re
pattern = re.compile({word[:-1].encode()!r} + b"[{word[-1]}]")
found, looked = [], 0
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps").read().splitlines():
        where, mode = line.split()[:2]
        if "[v" not in line and mode[0] == "r":
            start, end = (int(word, 16) for word in where.split("-"))
            memory.seek(start)
            data = memory.read(end - start)
            looked += len(data)
            found += [data[at.start():at.end() + 9] for at in pattern.finditer(data)]
print(found, looked > 10 << 20)
"""
    assert ran(one_slot, code, Limits(timeout_s=60)) == "[] True\n"


@requirement("leak.random")
def test_nothing_random_repeats(one_slot: Service) -> None:
    code = """
import numpy, random, secrets, tempfile, uuid
print(random.random(), random.Random().random(), random.getrandbits(64), sep="\\n")
print(numpy.random.rand(), numpy.random.default_rng().random(), numpy.random.RandomState().rand(),
      sep="\\n")
print(secrets.token_hex(8), uuid.uuid4(), os.urandom(8).hex(), tempfile.mktemp(), sep="\\n")
"""
    lines = [line for _ in range(12) for line in ran(one_slot, code).split()]
    assert len(lines) == 120 == len(set(lines))


@requirement("leak.random")
def test_a_seed_still_means_what_it_says(one_slot: Service) -> None:
    code = "import random, numpy\nrandom.seed(7); numpy.random.seed(7)\n" + (
        "print(random.random(), numpy.random.rand(), hash('text'))"
    )
    assert len({ran(one_slot, code) for _ in range(3)}) == 1
