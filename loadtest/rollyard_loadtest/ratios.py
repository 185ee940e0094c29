"""What a comparison comes to: Rollyard's figures over each peer's, round by round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from rollyard_loadtest.figures import BenchFigures, StageFigures

NATIVE = "sdk"


@dataclass(frozen=True)
class Ratios:
    """Rollyard over one peer, under one kind of load; medians over the rounds."""

    peer: str
    phase: str
    rate: float
    rate_range: tuple[float, float]
    p50: float | None
    p99: float | None
    wrong: int
    peer_wrong: int


def ratios(figures: BenchFigures) -> list[Ratios]:
    """Of all peers and phases; blocks of one round are held against each other."""
    phases: dict[str, dict[str, list[StageFigures]]] = {}
    for stage in figures.stages:
        phase = stage.name.partition(",")[0]
        phases.setdefault(phase, {}).setdefault(stage.target, []).append(stage)
    return [
        _of(peer, phase, targets[NATIVE], stages)
        for phase, targets in phases.items()
        for peer, stages in targets.items()
        if peer != NATIVE and NATIVE in targets
    ]


def _of(
    peer: str, phase: str, ours: Sequence[StageFigures], theirs: Sequence[StageFigures]
) -> Ratios:
    rates = _each(ours, theirs, lambda stage: stage.goodput_per_s) or [float("nan")]
    p50s = _each(ours, theirs, lambda stage: stage.p50_s)
    p99s = _each(ours, theirs, lambda stage: stage.p99_s)
    return Ratios(
        peer=peer,
        phase=phase,
        rate=median(rates),
        rate_range=(min(rates), max(rates)),
        p50=median(p50s) if p50s else None,
        p99=median(p99s) if p99s else None,
        wrong=sum(stage.wrong for stage in ours),
        peer_wrong=sum(stage.wrong for stage in theirs),
    )


def _each(
    ours: Sequence[StageFigures],
    theirs: Sequence[StageFigures],
    figure: Callable[[StageFigures], float | None],
) -> list[float]:
    pairs = [(figure(a), figure(b)) for a, b in zip(ours, theirs, strict=False)]
    return [a / b for a, b in pairs if a is not None and b]
