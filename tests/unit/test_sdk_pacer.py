"""Work in slices of the loop's turns."""

import asyncio
from collections.abc import Generator

import pytest

from rollyard import _pacer
from rollyard._call import Call
from rollyard._deadlines import PURGE_CALLS, Deadlines
from rollyard._pacer import Pacer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_others_have_turns_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pacer, "SLICE_S", 0.0)  # so that each step is a slice
    pacer, seen = Pacer(), list[str]()

    def work(name: str) -> Generator[None, None, None]:
        for number in range(3):
            seen.append(f"{name}{number}")
            yield

    async def other() -> None:
        for number in range(5):
            seen.append(f"other{number}")
            await asyncio.sleep(0)

    await asyncio.gather(pacer.finish(work("a")), pacer.finish(work("b")), other())
    assert [one for one in seen if one[0] != "o"] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert seen.index("other2") < seen.index("b1")


async def test_what_work_raises_comes_to_who_waits(caplog: pytest.LogCaptureFixture) -> None:
    pacer = Pacer()

    def broken() -> Generator[None, None, None]:
        yield
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await pacer.finish(broken())
    pacer.start(broken())
    await pacer.finish(iter_of(3))
    assert "work of the client failed" in caplog.text


def iter_of(steps: int) -> Generator[None, None, None]:
    for _ in range(steps):
        yield


async def test_cancelled_work_goes_no_further() -> None:
    pacer, seen = Pacer(), list[int]()

    def work() -> Generator[None, None, None]:
        while True:
            seen.append(1)
            yield

    task = asyncio.ensure_future(pacer.finish(work()))
    await asyncio.sleep(0)
    task.cancel()
    await pacer.finish(iter_of(1))
    steps = len(seen)
    await pacer.finish(iter_of(5))
    assert len(seen) == steps


async def test_stopped_it_drops_all() -> None:
    pacer, closed = Pacer(), list[bool]()

    def work() -> Generator[None, None, None]:
        try:
            while True:
                yield
        finally:
            closed.append(True)

    waiting = asyncio.ensure_future(pacer.finish(work()))
    pacer.start(work())
    while not closed:  # nothing but stop() ends it
        await asyncio.sleep(0)
        pacer.stop()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert closed == [True, True]


async def test_late_calls_are_told_in_the_order_of_their_time() -> None:
    loop, late = asyncio.get_running_loop(), list[tuple[str, float]]()
    everyone = asyncio.Event()

    def on_late(call: Call, timeout_s: float) -> None:
        late.append((str(call.asked), timeout_s))
        if len(late) == 2:
            everyone.set()

    deadlines = Deadlines(Pacer(), on_late)
    calls = {name: Call(name, loop) for name in ("slow", "quick", "done")}
    deadlines.add(calls["slow"], 0.03)
    deadlines.add(calls["done"], 0.001)
    deadlines.add(calls["quick"], 0.002)
    calls["done"].future.cancel()
    await asyncio.wait_for(everyone.wait(), 20)
    assert late == [("quick", 0.002), ("slow", 0.03)]
    deadlines.stop()


async def test_calls_that_ended_are_not_kept_until_their_time() -> None:
    loop = asyncio.get_running_loop()

    def on_late(_call: Call, _timeout_s: float) -> None: ...

    deadlines = Deadlines(Pacer(), on_late)
    for _ in range(20 * PURGE_CALLS):
        call = Call("", loop)
        deadlines.add(call, 3600.0)
        call.future.cancel()
    assert len(deadlines) <= 2 * PURGE_CALLS
    deadlines.stop()
