"""One client process: makes its share of a load and reports on standard output.

``python -m rollyard_loadtest.client`` reads an order (one JSON line) from standard input, answers
``ready``, waits for ``{"began": T}`` with T of time.monotonic, which all processes of a machine
share, and then writes one JSON line a second, and the tally at the end. Processes and not threads
or forks: the one that draws the view has threads, and each needs a core of its own.
"""

import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import uvloop
from pydantic import TypeAdapter

from rollyard_loadtest.drive import Driver, window
from rollyard_loadtest.load import AnyLoad, Burst, Closed, Load
from rollyard_loadtest.scenario import load as load_scenario
from rollyard_loadtest.tally import Tally, Tick
from rollyard_loadtest.target import Address, Target
from rollyard_loadtest.target_dialects import CodeJudgeTarget, SandboxFusionTarget, in_classes
from rollyard_loadtest.target_native import HttpTarget, SdkTarget
from rollyard_loadtest.workload import Work

POOL = 4096
"""Different programs that one client cycles through: drawn and encoded once."""
TICK_S = 1.0
BURST_TICK_S = 0.2
"""As long as a burst is younger than BURST_S, which may be all of it."""
BURST_S = 20.0
API_KEY_ENV = "ROLLYARD_API_KEY"

_LOAD: TypeAdapter[AnyLoad] = TypeAdapter(AnyLoad)


@dataclass(frozen=True)
class Order:
    """What one client is to do."""

    scenario: str
    """Name or path, as :func:`rollyard_loadtest.scenario.load` takes it."""
    load: dict[str, Any]
    address: Address
    seed: str
    client: int
    clients: int

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Order":
        """Of what :meth:`to_json` gave."""
        fields: dict[str, Any] = json.loads(line)
        fields["address"] = Address(**fields["address"])
        return cls(**fields)


def make_target(address: Address, load: Load) -> Target:
    """The target of an address."""
    match address.kind:
        case "sdk":
            in_flight = load.in_flight if isinstance(load, Closed) else 16384
            return SdkTarget(address.url, load, in_flight=in_flight)
        case "http":
            return HttpTarget(address.url, load, api_key=os.environ.get(API_KEY_ENV))
        case "sandboxfusion":
            return SandboxFusionTarget(address.url, load)
        case "codejudge":
            return CodeJudgeTarget(address.url, load)


def pool(order: Order) -> list[Work]:
    """The programs that this client sends, in turn."""
    scenario = load_scenario(order.scenario)
    works = scenario.works(f"{order.seed}-{order.client}", first=order.client * POOL)
    found = [next(works) for _ in range(POOL)]
    if order.address.null:  # such a worker answers ok to everything, and prints nothing
        return [replace(work, outcome="ok", stdout=None) for work in found]
    if order.address.kind in ("sandboxfusion", "codejudge"):
        found = [in_classes(work) for work in found]
    return found


async def perform(order: Order) -> None:
    """Carry out an order."""
    load = _LOAD.validate_python(order.load)
    tally = Tally(window(load))
    target = make_target(order.address, load)
    works = pool(order)
    driver = Driver(target, load, works, tally, seed=order.seed, client=order.client,
                    clients=order.clients)  # fmt: skip
    await target.open()
    try:
        await driver.warm()
        tally.tick = Tick()
        _say("ready")
        began = json.loads(await asyncio.to_thread(sys.stdin.readline))["began"]
        # What exists now stays: the collector need not walk it while the load runs.
        gc.collect()
        gc.freeze()
        cpu_s = time.process_time()
        ticker = _Ticker(driver, tally, began, is_burst=isinstance(load, Burst))
        ticking = asyncio.create_task(ticker.run())
        await driver.run(began)
        ticking.cancel()
        ticker.say()
        _say("done", cpu_s=time.process_time() - cpu_s, **tally.report())
    finally:
        await target.close()


class _Ticker:
    """Reports what came in, at times that are the same in all clients."""

    def __init__(self, driver: Driver, tally: Tally, began: float, *, is_burst: bool) -> None:
        self._driver, self._tally, self._began = driver, tally, began
        self._is_burst = is_burst
        self._said_s = 0.0

    async def run(self) -> None:
        at_s = 0.0
        while True:
            at_s += BURST_TICK_S if self._is_burst and at_s < BURST_S else TICK_S
            await asyncio.sleep(max(0.0, self._began + at_s - time.monotonic()))
            self.say()

    def say(self) -> None:
        tick, self._tally.tick = self._tally.tick, Tick()
        at_s = time.monotonic() - self._began
        _say("tick", at_s=at_s, during_s=at_s - self._said_s, in_flight=self._driver.in_flight,
             **tick.report())  # fmt: skip
        self._said_s = at_s


def _say(event: str, **fields: object) -> None:
    try:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)  # whoever started us is gone: no load without anybody who looks


def main() -> None:
    """Read the order and carry it out."""
    uvloop.run(perform(Order.from_json(sys.stdin.readline())))


if __name__ == "__main__":
    main()
