"""The ``rollyard-trainer`` command."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import App, Parameter

from rollyard import RollyardError, __version__

OK, USAGE, OURS, INTERRUPTED = 0, 2, 3, 130

app = App(
    name="rollyard-trainer",
    help="Train with GRPO-RoC (rStar2-Agent, arXiv 2508.20722), and put its claim to the test.",
    version=__version__,
)
_Url = Annotated[str | None, Parameter(name="--base-url", env_var="ROLLYARD_URL")]


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


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
    base_url: _Url = None,
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
    torch = _torch()
    from rollyard_trainer.toy.arms import ARMS, Settings
    from rollyard_trainer.toy.report import write_report
    from rollyard_trainer.toy.run import experiment
    from rollyard_trainer.toy.task import Habits

    torch.set_num_threads(1)  # this model is too small for two; run two commands instead
    names = list(ARMS) if arms == "all" else _words(arms)
    if unknown := [name for name in names if name not in ARMS]:
        _say(f"rollyard-trainer: unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
        return USAGE
    settings = Settings(
        steps=steps, turns=turns, rate=rate, keep=keep, habits=Habits(first_error=first_error)
    )
    try:
        asyncio.run(experiment(out, names, _seeds(seeds), settings, base_url, recheck, _say))
    except RollyardError as error:
        _say(f"rollyard-trainer: {error}\nIs the service running? Start it with: rollyard up")
        return OURS
    _say(f"report: {write_report(out, settings)}")
    return OK


@app.command
def toy_arms() -> int:
    """List the arms of the toy experiment."""
    _torch()
    from rollyard_trainer.toy.arms import ARMS

    for name, arm in ARMS.items():
        sys.stdout.write(f"{name:15} {arm.says}\n")
    return OK


def _torch() -> Any:
    try:
        import torch  # pyright: ignore
    except ImportError:
        _say(
            "rollyard-trainer: this needs torch: pip install 'rollyard[trainer-torch]'\n"
            "A build for CPUs is enough; in a checkout, scripts/setup-trainer gets one."
        )
        raise SystemExit(OURS) from None
    return torch  # pyright: ignore


def main() -> NoReturn:
    try:
        raise SystemExit(app())
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
