"""What a person sees in the terminal while a load test runs, and after it."""

from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollyard_loadtest.drive import window
from rollyard_loadtest.figures import BenchFigures, Second, StageFigures
from rollyard_loadtest.scenario import Stage
from rollyard_loadtest.target import SERVERS

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 48


class View:
    """A live panel; without a terminal, a line for each stage."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live: Live | None = None
        self._stage: Stage | None = None
        self._place = ""
        self._seconds: list[Second] = []
        self._done: list[StageFigures] = []

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def stage_begins(self, stage: Stage, target: str, number: int, of: int) -> None:
        self._stage, self._seconds = stage, []
        self._place = f"{SERVERS[target]}: {stage.name}" + (
            f" ({number} of {of})" if of > 1 else ""
        )
        self._draw()

    def second_ended(self, second: Second) -> None:
        self._seconds.append(second)
        self._draw()

    def stage_ended(self, figures: StageFigures) -> None:
        self._done.append(figures)
        if self._live is None:
            self._console.print(
                f"{SERVERS[figures.target]}: {line(figures)}", highlight=False, soft_wrap=True
            )

    def _draw(self) -> None:
        if self._live is not None:
            parts = [table(self._done)] if self._done else []
            self._live.update(Group(*parts, self._panel()))

    def _panel(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        if not self._seconds:
            return Panel(Text("client processes start, connections and slots are made …"),
                         title=f"{self._title} · {self._place}", border_style="cyan")  # fmt: skip
        last = self._seconds[-1]
        rates = [second.good / second.during_s for second in self._seconds]
        tails = [(second.p99_s or 0.0) for second in self._seconds]
        grid.add_row("good answers/s", f"[bold]{rates[-1]:,.0f}", _spark(rates))
        grid.add_row("in flight", f"[bold]{last.in_flight:,}",
                     _spark([second.in_flight for second in self._seconds]))  # fmt: skip
        grid.add_row("p50 / p99", f"[bold]{duration(last.p50_s)} / {duration(last.p99_s)}",
                     _spark(tails))  # fmt: skip
        for name in ("wrong", "lost", "refused", "unjudged"):
            count = sum(getattr(second, name) for second in self._seconds)
            style = (
                "bold red" if count and name in ("wrong", "lost") else "dim" if not count else ""
            )
            grid.add_row(Text(name, style), Text(f"{count:,}", style))
        grid.add_row("", "", Text(self._progress(last), "dim"))
        return Panel(grid, title=f"{self._title} · {self._place}", border_style="cyan")

    def _progress(self, last: Second) -> str:
        assert self._stage is not None
        first_s, end_s = window(self._stage.load)
        if last.at_s < first_s:
            return f"warm-up, {first_s - last.at_s:.0f} s left"
        if self._stage.load.arrivals == "burst":
            return f"{last.at_s:.0f} s since the burst"
        if last.at_s > end_s:
            return f"waiting for the last answers, {last.at_s - end_s:.0f} s"
        return f"{end_s - last.at_s:.0f} s left"


def terminal() -> Console:
    """Standard error; wide enough for the tables where it is a file."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=150)


def _spark(values: Sequence[float]) -> str:
    shown = values[-_WIDTH:]
    top = max(shown) or 1.0
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in shown)


def duration(seconds: float | None) -> str:
    """Seconds for people: three digits and a unit."""
    if seconds is None:
        return "–"  # noqa: RUF001 - a dash for nothing
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def line(figures: StageFigures) -> str:
    """One stage in a line."""
    return (
        f"{figures.name}: {figures.goodput_per_s:,.1f} good runs/s, "
        f"p50 {duration(figures.p50_s)}, p99 {duration(figures.p99_s)}, "
        f"{figures.wrong} wrong, {figures.lost} lost, {figures.refused} refused, "
        f"{figures.unjudged} unjudged"
    )


def table(stages: Sequence[StageFigures]) -> Table:
    """All stages so far."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    several = len({stage.target for stage in stages}) > 1
    if several:
        shown.add_column("server")
    shown.add_column("load")
    for name in ("offered/s", "good/s", "p50", "p90", "p99", "p99.9", "wrong", "lost", "refused",
                 "unjudged", "retried"):  # fmt: skip
        shown.add_column(name, justify="right")
    for s in stages:
        latencies = [duration(s.latency_s.get(q)) for q in ("0.5", "0.9", "0.99", "0.999")]
        shown.add_row(
            *([SERVERS[s.target]] if several else []),
            s.name, f"{s.offered_per_s:,.1f}", f"{s.goodput_per_s:,.1f}", *latencies,
            Text(f"{s.wrong:,}", "bold red" if s.wrong else ""),
            Text(f"{s.lost:,}", "bold red" if s.lost else ""),
            f"{s.refused:,}", f"{s.unjudged:,}", f"{s.retried:,}",
        )  # fmt: skip
    return shown


def summary(figures: BenchFigures) -> Group:
    """What is left on the screen at the end."""
    parts: list[Table | Text] = [table(figures.stages)]
    for stage in figures.stages:
        if stage.cpu_ms_per_run and len(figures.stages) == 1:
            parts.append(Text(costs(stage), "dim"))
        examples = list(dict.fromkeys(stage.examples))[:3] if stage.failed else []
        parts += [Text(f"  {text}", "red", overflow="ellipsis", no_wrap=True) for text in examples]
        parts += [Text(f"  {text}", "yellow") for text in warnings(stage)]
    for goal in figures.goals:
        got = "nothing" if goal.got is None else f"{goal.got:.3g}"
        text = f"goal {goal.name} {goal.wanted:g}: {got}, {'met' if goal.met else 'missed'}"
        parts.append(Text(text, "green" if goal.met else "yellow"))
    return Group(*parts)


def costs(stage: StageFigures) -> str:
    """CPU of each part, in a line."""
    shown = ", ".join(f"{part} {ms:.3g}" for part, ms in stage.cpu_ms_per_run.items() if ms)
    return f"CPU ms a run: {shown}"


def warnings(stage: StageFigures) -> list[str]:
    """What makes a stage's figures doubtful."""
    found: list[str] = []
    if (stage.client_behind_p99_s or 0.0) > 0.02:
        found.append(
            f"{stage.name}: the load generator was late itself "
            f"(p99 {duration(stage.client_behind_p99_s)}): give it --clients or a core"
        )
    if (stage.slow or 1.0) > 1.4:
        found.append(
            f"{stage.name}: the machine was {stage.slow:.1f} times slower than at its best"
        )
    if not stage.good:
        found.append(f"{stage.name}: no right answer at all")
    return found
