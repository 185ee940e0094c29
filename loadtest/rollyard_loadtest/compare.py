"""Rollyard beside other servers: blocks of the same load in turns, and what they come to."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp
from rich.table import Table

from rollyard_loadtest import machine
from rollyard_loadtest import scenario as scenarios
from rollyard_loadtest.bench import assemble
from rollyard_loadtest.figures import BenchFigures, StageFigures
from rollyard_loadtest.load import Closed, Poisson
from rollyard_loadtest.ratios import ratios
from rollyard_loadtest.scenario import Stage
from rollyard_loadtest.stack import NotReady, Stack, StackOptions, require_ready
from rollyard_loadtest.stage import StageRun
from rollyard_loadtest.target import SERVERS, Address
from rollyard_loadtest.target_native import session, split_url
from rollyard_loadtest.view import View, summary, terminal

CLOSED, HALF = "closed loop", "half load"
LONGEST_S = 120.0
"""After a block, in which answers may still come: a peer under load takes its time."""
PING_S = 10.0
PINGS = {"sandboxfusion": "/v1/ping", "codejudge": "/ping"}


@dataclass(kw_only=True)
class Comparison:
    """One comparison; :meth:`run` does it all.

    Raises:
        ScenarioError: there is no such scenario.
        ValueError: nothing is there to compare with.
    """

    scenario_path: str
    native: str | None
    sandboxfusion: str | None
    codejudge: str | None
    rounds: int
    block_s: float
    warmup_s: float
    in_flight: int
    codejudge_batch: int
    half_load: bool
    slots: int | None
    seed: str

    def __post_init__(self) -> None:
        self.scenario = scenarios.load(self.scenario_path)
        if not (self.sandboxfusion or self.codejudge):
            raise ValueError(
                "nothing to compare with: give --sandboxfusion URL (a server with /run_code), "
                "--codejudge URL (one with /run and /run/long-batch), or both"
            )

    def run(self) -> BenchFigures:
        """Take turns, show the ratios, return all blocks.

        Raises:
            NotReady: one of the servers does not answer.
            ClientDied: a process of the load generator ended early.
        """
        console = terminal()
        with contextlib.ExitStack() as held:
            stack, native = None, self.native
            if native is None:
                console.print("starting a service on this machine …", style="dim")
                stack = held.enter_context(Stack(StackOptions(slots=self.slots)))
                native = stack.addresses[0]
            targets = [Address("sdk", native)]
            if self.sandboxfusion:
                targets.append(Address("sandboxfusion", self.sandboxfusion))
            if self.codejudge:
                targets.append(Address("codejudge", self.codejudge))
            view = held.enter_context(View(console, "compare"))
            figures = asyncio.run(self._turns(targets, stack, view))
        console.print(summary(figures))
        console.print(_table(figures))
        return figures

    async def _turns(
        self, targets: Sequence[Address], stack: Stack | None, view: View
    ) -> BenchFigures:
        started, about = datetime.now(UTC), machine.describe()
        await require_ready(targets[0].url)
        for target in targets[1:]:
            await _require_ping(target)
        done: list[StageFigures] = []
        blocks = [(number, target) for number in range(self.rounds) for target in targets]
        phases = 2 if self.half_load else 1

        async def block(stage: Stage, number: int, target: Address) -> None:
            view.stage_begins(stage, target.kind, len(done) + 1, len(blocks) * phases)
            run = StageRun(
                self.scenario_path, stage, [target], seed=f"{self.seed}-{number}",
                watch=view.second_ended, stack=stack if target.kind == "sdk" else None,
            )  # fmt: skip
            figures = await run.run()
            done.append(figures)
            view.stage_ended(figures)

        for number, target in blocks:
            await block(self._closed(number, target), number, target)
        if self.half_load:
            capacity = _capacities(done)
            for number, target in blocks:
                await block(self._half(number, capacity[target.kind]), number, target)
        return assemble(self.scenario, done, started=started, about=about, seed=self.seed,
                        rounds=self.rounds)  # fmt: skip

    def _closed(self, number: int, target: Address) -> Stage:
        batch = self.codejudge_batch if target.kind == "codejudge" else 1
        load = Closed(
            arrivals="closed", in_flight=max(self.in_flight, batch), batch=batch,
            duration_s=self.block_s, warmup_s=self.warmup_s, drain_s=LONGEST_S,
        )  # fmt: skip
        return Stage(name=f"{CLOSED}, round {number + 1}", load=load)

    def _half(self, number: int, capacity: float) -> Stage:
        load = Poisson(
            arrivals="poisson", rate_per_s=max(0.1, capacity / 2), duration_s=self.block_s,
            warmup_s=self.warmup_s, drain_s=LONGEST_S,
        )  # fmt: skip
        return Stage(name=f"{HALF}, round {number + 1}", load=load)


def _capacities(done: Sequence[StageFigures]) -> dict[str, float]:
    """Target to its median goodput in the closed loop."""
    rates: dict[str, list[float]] = {}
    for stage in done:
        rates.setdefault(stage.target, []).append(stage.goodput_per_s)
    return {target: sorted(found)[len(found) // 2] for target, found in rates.items()}


async def _require_ping(target: Address) -> None:
    base, socket = split_url(target.url)
    path = PINGS[target.kind]
    try:
        async with (
            asyncio.timeout(PING_S),
            session(socket, {}) as http,
            http.get(f"{base}{path}") as answer,
        ):
            if answer.status == 200:
                return
            said = f"HTTP {answer.status}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
    raise NotReady(
        f"--{target.kind} {target.url}: {path} gives {said}; give the server's base URL, "
        "such as http://127.0.0.1:8080"
    )


def _table(figures: BenchFigures) -> Table:
    shown = Table(title="Rollyard ÷ each, median of the rounds", title_justify="left", box=None)
    for name in ("against", "load", "runs/s", "range", "p50", "p99", "wrong: ours", "theirs"):
        shown.add_column(name, justify="left" if name in ("against", "load") else "right")
    for r in ratios(figures):
        low, high = r.rate_range
        shown.add_row(
            SERVERS[r.peer], r.phase, f"[bold]{r.rate:.3g}", f"{low:.3g} to {high:.3g}",
            f"{r.p50:.3g}" if r.p50 else "", f"{r.p99:.3g}" if r.p99 else "",
            str(r.wrong), str(r.peer_wrong),
        )  # fmt: skip
    return shown
