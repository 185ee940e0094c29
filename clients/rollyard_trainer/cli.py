"""The ``rollyard-trainer`` command."""

import asyncio
import sys
from pathlib import Path
from typing import NoReturn

from cyclopts import App

from rollyard import RollyardError, __version__
from rollyard_trainer.cli_eval import compare, evaluate, power
from rollyard_trainer.cli_train import plot, toy_data, train
from rollyard_trainer.terminal import INTERRUPTED, OK, OURS, USAGE, Url, say, torch_or_exit

app = App(
    name="rollyard-trainer",
    help="Train with GRPO-RoC (rStar2-Agent, arXiv 2508.20722), and put its claim to the test.",
    version=__version__,
)
app.command(train)
app.command(plot)
app.command(toy_data)
app.command(evaluate, name="eval")
app.command(compare)
app.command(power)


def _words(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word]


def _seeds(text: str) -> list[int]:
    if "-" in text:
        first, _, last = text.partition("-")
        return list(range(int(first), int(last) + 1))
    words = _words(text)
    return [int(word) for word in words]


@app.command
def toy(
    *,
    out: Path = Path("toy-results"),
    arms: str = "all",
    seeds: str = "0-7",
    steps: int = 80,
    turns: int = 4,
    first_error: float = 0.35,
    rate: float = 1e-4,
    keep: int = 8,
    recheck: float = 0.01,
    base_url: Url = None,
) -> int:
    """Reproduce GRPO-RoC in miniature, on one CPU core, tool calls through a running service.

    Start a service first (`rollyard up`, Python 3.12 or newer). Each run of an arm with a seed is
    appended to OUT/results.jsonl; interrupted, the same command continues. Two commands with other
    seeds may share OUT, one per core. OUT/report.html is written at the end.

    Args:
        out: Directory of results, cold start and page.
        arms: Names separated by commas, or "all"; `rollyard-trainer toy-arms` lists them.
        seeds: Such as 0-7 or 1,4.
        steps: Training steps of each run.
        turns: T; with 2, a failed call cannot be tried again. 3, 4, 6 to sweep.
        first_error: Share of first calls that fail at the start. 0.1, 0.2, 0.35 to sweep.
        rate: Learning rate.
        keep: G.
        recheck: Share of known programs that are executed again; 1 executes every call.
        base_url: The service; default: ROLLYARD_URL, else the one of `rollyard up`.
    """
    torch = torch_or_exit()
    from rollyard_trainer.toy import tables
    from rollyard_trainer.toy.arms import ARMS, Settings
    from rollyard_trainer.toy.report import rows_of, write_report
    from rollyard_trainer.toy.run import experiment
    from rollyard_trainer.toy.task import Habits

    torch.set_num_threads(1)  # this model is too small for two; run two commands instead
    names = list(ARMS) if arms == "all" else _words(arms)
    if unknown := [name for name in names if name not in ARMS]:
        say(f"rollyard-trainer: unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
        return USAGE
    settings = Settings(
        steps=steps, turns=turns, rate=rate, keep=keep, habits=Habits(first_error=first_error)
    )
    try:
        asyncio.run(experiment(out, names, _seeds(seeds), settings, base_url, recheck, say))
    except RollyardError as error:
        say(f"rollyard-trainer: {error}\nIs the service running? Start it with: rollyard up")
        return OURS
    page = write_report(out, settings)
    page.with_suffix(".md").write_text(tables.arms(rows_of(out, settings)))
    say(f"report: {page}, the same figures as Markdown in report.md")
    return OK


@app.command
def toy_sweep(*directories: Path, picture: Path | None = None) -> int:
    """Compare RoC with its controls under several settings of the toy, as a Markdown table.

    Example: `rollyard-trainer toy-sweep results results-turns-2 --picture sweep.png`

    Args:
        directories: Of `rollyard-trainer toy`, each with one or several settings.
        picture: Draw failed calls against accuracy, a panel for each setting.
    """
    torch_or_exit()
    from rollyard_trainer.toy import tables

    if picture is not None and not picture.parent.is_dir():
        say(f"rollyard-trainer: {picture.parent} is not there; make it, or choose another picture")
        return USAGE
    try:
        found = tables.read(directories)
    except ValueError as error:
        say(f"rollyard-trainer: {error}")
        return USAGE
    sys.stdout.write(tables.sweep(found))
    if picture is not None:
        tables.picture(found, picture)
        say(f"picture: {picture}")
    return OK


@app.command
def toy_arms() -> int:
    """List the arms of the toy experiment."""
    torch_or_exit()
    from rollyard_trainer.toy.arms import ARMS

    for name, arm in ARMS.items():
        sys.stdout.write(f"{name:15} {arm.says}\n")
    return OK


@app.command
def schedule(
    *, engines: int = 4, rollouts: int = 256, capacity: int = 60_000, limit: int = 8192,
    median: int = 4000, tool: float = 30.0, seed: int = 0,
) -> int:  # fmt: skip
    """Simulate admission by KV cache against static allocation (paper, section 3.2).

    Args:
        engines: Inference engines.
        rollouts: Of one batch.
        capacity: KV cache of each engine, tokens.
        limit: Longest rollout, tokens.
        median: Of the rollouts' lengths, which are log-normal.
        tool: Time of a tool call, in units of one token of a lone rollout.
        seed: Of the lengths.
    """
    from rollyard_trainer.simulation import Scene, simulate

    scene = Scene(engines=engines, rollouts=rollouts, capacity=capacity, limit=limit,
                  median=median, tool=tool, seed=seed)  # fmt: skip
    mean = int(scene.lengths().mean())
    rows = {
        "static": simulate(scene, dynamic=False),
        f"reserve {limit} (worst case)": simulate(scene, dynamic=True),
        f"reserve {mean} (mean)": simulate(scene, dynamic=True, reserve=mean),
    }
    first = next(iter(rows.values()))
    sys.stdout.write(f"{'':28}{'time':>10}{'speed-up':>10}{'evictions':>11}{'idle':>7}\n")
    for name, row in rows.items():
        sys.stdout.write(
            f"{name:28}{row.ticks:10.0f}{first.ticks / row.ticks:9.2f}x{row.evictions:11}"
            f"{row.idle:7.1%}\n"
        )
    return OK


def main() -> NoReturn:
    try:
        raise SystemExit(app())
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
