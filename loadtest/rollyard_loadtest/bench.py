"""One whole load test: a service, the scenario's stages one after the other, the figures."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from rollyard import __version__
from rollyard_loadtest import machine
from rollyard_loadtest.figures import BenchFigures, Goal, Machine, Second, StageFigures
from rollyard_loadtest.load import Burst, Poisson
from rollyard_loadtest.scenario import Scenario, Stage
from rollyard_loadtest.stack import Stack
from rollyard_loadtest.stage import StageRun
from rollyard_loadtest.target import Address


class Watcher(Protocol):
    """Whoever looks on: the terminal view, or nobody."""

    def stage_begins(self, stage: Stage, target: str, number: int, of: int) -> None:
        """A stage is about to start."""
        ...

    def second_ended(self, second: Second) -> None:
        """A second of it is over."""
        ...

    def stage_ended(self, figures: StageFigures) -> None:
        """All its runs are answered, refused or lost."""
        ...


class Nobody:
    """A watcher that does not."""

    def stage_begins(self, stage: Stage, target: str, number: int, of: int) -> None: ...

    def second_ended(self, second: Second) -> None: ...

    def stage_ended(self, figures: StageFigures) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One scenario against one service."""

    path: str
    """Name or file of the scenario, for the client processes."""
    scenario: Scenario
    addresses: Sequence[Address]
    seed: str = "1"
    overrides: dict[str, float] = field(default_factory=dict[str, float])
    """Fields of the load (such as ``duration_s``) that the command line changed."""
    stack: Stack | None = None

    async def run(self, watcher: Watcher) -> BenchFigures:
        """Put on all stages, in order.

        Raises:
            ClientDied: a client process did not come to its end.
        """
        started, about = datetime.now(UTC), machine.describe()
        done: list[StageFigures] = []
        stages = self.scenario.stages()
        for number, planned in enumerate(stages, start=1):
            stage = self._final(planned, done)
            watcher.stage_begins(stage, self.addresses[0].kind, number, len(stages))
            run = StageRun(self.path, stage, self.addresses, seed=f"{self.seed}-{number}",
                           watch=watcher.second_ended, stack=self.stack)  # fmt: skip
            figures = await run.run()
            done.append(figures)
            watcher.stage_ended(figures)
        return assemble(
            self.scenario, done, started=started, about=about, seed=self.seed,
            null=self.addresses[0].null,
        )  # fmt: skip

    def _final(self, stage: Stage, done: list[StageFigures]) -> Stage:
        """With what the command line and the stages before it say."""
        if stage.of_capacity is not None:
            stage = stage.at_capacity(done[0].goodput_per_s)
        load = stage.load
        for name, value in self.overrides.items():
            # One that this way of arriving has not (in_flight of a burst) is an error there.
            load = load.with_field(name, value)
        renamed = load.summary() if stage.name == stage.load.summary() else stage.name
        return stage.model_copy(update={"load": load, "name": renamed})


def assemble(
    scenario: Scenario,
    stages: list[StageFigures],
    *,
    started: datetime,
    about: Machine,
    seed: str,
    null: bool = False,
    rounds: int = 0,
) -> BenchFigures:
    """All figures with what they are of."""
    return BenchFigures(
        rollyard=__version__,
        commit=machine.commit(),
        command=shlex.join(["rollyard", *sys.argv[1:]]),
        started=started.isoformat(timespec="seconds"),
        machine=about,
        scenario=_described(scenario),
        null_workers=null,
        seed=seed,
        stages=stages,
        goals=[] if rounds else goals(scenario, stages),
        rounds=rounds,
    )


def _described(scenario: Scenario) -> dict[str, Any]:
    return {**scenario.model_dump(by_alias=True), "shares": scenario.shares()}


def goals(scenario: Scenario, stages: list[StageFigures]) -> list[Goal]:
    """What the scenario asks for, beside what came of it; of its last stage, where it has many."""
    wanted, last = scenario.goals, stages[-1]
    found: list[Goal] = []

    def add(name: str, want: float | None, got: float | None, *, at_most: bool) -> None:
        if want is not None:
            met = got is not None and (got <= want if at_most else got >= want)
            found.append(Goal(name=name, wanted=want, got=got, met=met))

    add("p50_s", wanted.p50_s, last.p50_s, at_most=True)
    add("p99_s", wanted.p99_s, last.p99_s, at_most=True)
    add("runs_per_s", wanted.runs_per_s, last.goodput_per_s, at_most=False)
    add("goodput_share", wanted.goodput_share, _goodput_share(stages), at_most=False)
    return found


def _goodput_share(stages: list[StageFigures]) -> float | None:
    """Least goodput of the stages that were offered more than the capacity, over the capacity."""
    capacity = stages[0].goodput_per_s
    beyond = [s.goodput_per_s for s in stages[1:] if s.offered_per_s > capacity]
    return min(beyond) / capacity if beyond and capacity else None


def fits(scenario: Scenario, overrides: dict[str, float]) -> None:
    """Check what the command line changes against the scenario's way of arriving.

    Raises:
        ValueError: the load has no such field, or not with such a value; the message says so.
    """
    known = set(type(scenario.load).model_fields) - {"arrivals", "jobs", "drain_s"}
    for name in overrides:
        if name not in known:
            raise ValueError(
                f"--{name.replace('_', '-')} does not go with arrivals = "
                f"{scenario.load.arrivals!r}; scenario {scenario.name!r} takes "
                + ", ".join(f"--{one.replace('_', '-')}" for one in sorted(known))
            )


__all__ = ["Bench", "Burst", "Nobody", "Poisson", "Watcher", "assemble", "fits", "goals"]
