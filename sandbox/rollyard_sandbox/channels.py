"""Known channels between two runs at the same time, tried and measured by ``doctor --attack``.

Not walls: SECURITY.md says why they stay. Here a machine's owner sees how wide they are, and that
a channel which is believed to be open really is. Two programs that know each other are needed; none
of these shows one run what an unwitting other does.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import msgspec

from rollyard_sandbox.pool import Pool
from rollyard_sandbox.reports import SlotReport
from rollyard_sandbox.slots import Slot

_BOTH = r"""
import fcntl, json, os, random, time
data, clock, answer = (
    os.open("/opt/python/lib/python3.%d/%s.py" % (sys.version_info[1], name), os.O_RDONLY)
    for name in ("abc", "ast", "bdb"))
bits = random.Random(7)
ends = time.monotonic() + 1.0
def hold(file, held):
    fcntl.flock(file, fcntl.LOCK_EX if held else fcntl.LOCK_UN)
def held(file):
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
def waited(file, wanted):
    while held(file) != wanted:
        if time.monotonic() > ends:
            return False
    return True
"""
_SENDER = r"""
tick = True
while True:
    hold(data, bits.getrandbits(1))
    hold(clock, tick)
    if not waited(answer, tick):
        break
    tick = not tick
"""
_RECEIVER = r"""
right, tick, begun = 0, True, 0
while waited(clock, tick):
    begun = begun or time.monotonic()
    right += held(data) == bool(bits.getrandbits(1))
    hold(answer, tick)
    tick = not tick
print(json.dumps(right / (time.monotonic() - begun) if begun else 0))
"""

Run = Callable[[Slot, str], Awaitable[SlotReport]]


@dataclass(frozen=True)
class Channel:
    """What came of one; ``bits_per_s`` is 0 where it is closed."""

    name: str
    question: str
    bits_per_s: int


@contextlib.asynccontextmanager
async def _two(pool: Pool, template: str, disk_bytes: int) -> AsyncGenerator[tuple[Slot, Slot]]:
    first = await pool.acquire(template, disk_bytes)
    try:
        second = await pool.acquire(template, disk_bytes)
        try:
            yield first, second
        finally:
            await pool.release(second)
    finally:
        await pool.release(first)


async def measure(pool: Pool, template: str, disk_bytes: int, run: Run) -> list[Channel]:
    """Run sender and receiver beside each other for a second; the pool has two slots.

    Raises:
        JailError, SlotLost: there is no slot to try it in.
    """
    async with _two(pool, template, disk_bytes) as (first, second):
        _, heard = await asyncio.gather(
            run(first, f"import sys\n{_BOTH}{_SENDER}"),
            run(second, f"import sys\n{_BOTH}{_RECEIVER}"),
        )
    try:
        rate = msgspec.json.decode(heard.stdout, type=float)
    except msgspec.DecodeError:
        rate = 0.0  # the calls are refused
    question = "Can two runs signal each other by locks on the image's files?"
    return [Channel("file locks", question, round(rate))]
