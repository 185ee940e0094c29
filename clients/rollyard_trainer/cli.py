"""The ``rollyard-trainer`` command."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from cyclopts import App, Parameter

from rollyard import AsyncClient, Limits, RollyardError, __version__

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


@app.command(name="eval")
def evaluate(
    problems: Path,
    *,
    model: str,
    model_url: str = "http://127.0.0.1:8000/v1",
    model_key: Annotated[str | None, Parameter(env_var="OPENAI_API_KEY")] = None,
    api: Literal["completions", "chat"] = "completions",
    out: Path = Path("result.json"),
    tools: bool = True,
    k: int = 16,
    turns: int = 30,
    max_tokens: int = 30_000,
    temperature: float = 0.6,
    timeout_s: float = 10.0,
    memory_bytes: int = 512 << 20,
    concurrency: int = 64,
    base_url: _Url = None,
) -> int:
    """Measure a model behind any OpenAI-compatible server: avg@k with its interval.

    Defaults are the paper's: up to 30K tokens and 30 turns, temperature 0.6, 16 samples. With
    --no-tools the model gets the same question without a tool, and one turn.

    Args:
        problems: JSONL, each line {"problem": "…", "answer": "…"}.
        model: The name that its server gives it.
        model_url: Where the model is served.
        model_key: Its bearer key.
        api: "completions" sends the paper's prompt in Qwen's markup; "chat", messages.
        out: Where per-problem scores go; `rollyard-trainer compare` reads them.
        timeout_s: Of each tool call.
        memory_bytes: Of each tool call.
        concurrency: Requests to the model at once.
        base_url: The Rollyard service that runs the tool calls.
    """
    from rollyard_trainer import template
    from rollyard_trainer.engines.openai import ModelError, OpenAIEngine
    from rollyard_trainer.env import service
    from rollyard_trainer.evals.protocol import Protocol, read_problems, table
    from rollyard_trainer.evals.run import measure

    try:
        rows, digest = read_problems(problems)
    except (OSError, ValueError) as error:
        _say(f"rollyard-trainer: {error}")
        return USAGE
    protocol = Protocol(
        problems=digest, template=template.digest(), tools=tools, turns=turns, k=k, api=api,
        max_tokens=max_tokens, temperature=temperature, timeout_s=timeout_s,
        memory_bytes=memory_bytes,
    )  # fmt: skip

    async def run() -> None:
        async with (
            OpenAIEngine(model_url, model, api=api, api_key=model_key,
                         concurrency=concurrency) as engine,
            AsyncClient(base_url, job="eval") as client,
        ):  # fmt: skip
            limits = Limits(timeout_s=timeout_s, memory_bytes=memory_bytes)
            runner = service(client, limits=limits, job="eval")
            result = await measure(engine, model, rows, protocol, runner, _say)
        result.write(out)
        sys.stdout.write(table([result]) + "\n")

    failed: list[Exception] = []
    try:
        asyncio.run(run())
    except* (ModelError, RollyardError) as errors:
        failed += errors.exceptions
    for error in failed[:3]:
        _say(f"rollyard-trainer: {error}")
    return OURS if failed else OK


@app.command
def compare(results: list[Path]) -> int:
    """Tabulate results of `rollyard-trainer eval`; refuses those of different protocols."""
    from rollyard_trainer.evals.protocol import NotComparable, Result, table

    try:
        sys.stdout.write(table([Result.read(path) for path in results]) + "\n")
    except (OSError, NotComparable) as error:
        _say(f"rollyard-trainer: {error}")
        return USAGE
    return OK


@app.command
def power(gap: float, *, accuracy: float = 0.7, k: int = 16, correlation: float = 0.5) -> int:
    """Say how many problems show a difference of GAP in accuracy, with 80% power at 5%.

    Args:
        gap: Such as 0.03.
        accuracy: About where the models are.
        k: Samples per problem.
        correlation: Between the two models' accuracies per problem.
    """
    from rollyard_trainer.evals.statistics import problems_needed

    try:
        needed = problems_needed(gap, accuracy=accuracy, k=k, correlation=correlation)
    except ValueError as error:
        _say(f"rollyard-trainer: {error}")
        return USAGE
    sys.stdout.write(f"{needed}\n")
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
