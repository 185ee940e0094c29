"""``rollyard-trainer eval``, ``compare`` and ``power``."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from rollyard import AsyncClient, Limits, RollyardError
from rollyard_trainer.terminal import OK, OURS, USAGE, Url, say


def evaluate(
    problems: Path,
    *,
    model: str,
    model_url: tuple[str, ...] = ("http://127.0.0.1:8000/v1",),
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
    base_url: Url = None,
) -> int:
    """Measure a model behind any OpenAI-compatible server: avg@k with its interval.

    Defaults are the paper's: up to 30K tokens and 30 turns, temperature 0.6, 16 samples. With
    --no-tools the model gets the same question without a tool, and one turn.

    Args:
        problems: JSONL, each line {"problem": "…", "answer": "…"}.
        model: The name that its server gives it.
        model_url: Where the model is served; given several times, rollouts are spread over these
            vLLM or SGLang servers by the KV cache that each one's /metrics says it has.
        model_key: Its bearer key.
        api: "completions" sends the paper's prompt in Qwen's markup; "chat", messages.
        out: Where per-problem scores go; `rollyard-trainer compare` reads them.
        timeout_s: Of each tool call.
        memory_bytes: Of each tool call.
        concurrency: Requests to the model at once, where it is one server.
        base_url: The Rollyard service that runs the tool calls.
    """
    from rollyard_trainer import template
    from rollyard_trainer.engines.fleet import Fleet
    from rollyard_trainer.engines.openai import ModelError, OpenAIEngine
    from rollyard_trainer.env import service
    from rollyard_trainer.evals.protocol import Protocol, read_problems, table
    from rollyard_trainer.evals.run import image_of, measure

    try:
        rows, digest = read_problems(problems)
    except (OSError, ValueError) as error:
        say(f"rollyard-trainer: {error}")
        return USAGE
    options: dict[str, Any] = {"api": api, "api_key": model_key}

    async def run() -> None:
        engine = (
            OpenAIEngine(model_url[0], model, concurrency=concurrency, **options)
            if len(model_url) == 1
            else Fleet(model_url, model, **options)
        )
        async with engine, AsyncClient(base_url, job="eval") as client:
            limits = Limits(timeout_s=timeout_s, memory_bytes=memory_bytes)
            runner = service(client, limits=limits, job="eval")
            protocol = Protocol(
                problems=digest, template=template.digest(), image=await image_of(runner),
                tools=tools, turns=turns, k=k, api=api, max_tokens=max_tokens,
                temperature=temperature, timeout_s=timeout_s, memory_bytes=memory_bytes,
            )  # fmt: skip
            result = await measure(engine, model, rows, protocol, runner, say)
        result.write(out)
        sys.stdout.write(table([result]) + "\n")

    failed: list[Exception] = []
    try:
        asyncio.run(run())
    except* (ModelError, RollyardError, ValueError) as errors:  # ValueError: it fits no server
        failed += errors.exceptions
    for error in failed[:3]:
        say(f"rollyard-trainer: {error}")
    return OURS if failed else OK


def compare(results: list[Path]) -> int:
    """Tabulate results of `rollyard-trainer eval`; refuses those of different protocols."""
    from rollyard_trainer.evals.protocol import NotComparable, Result, table

    try:
        sys.stdout.write(table([Result.read(path) for path in results]) + "\n")
    except (OSError, NotComparable) as error:
        say(f"rollyard-trainer: {error}")
        return USAGE
    return OK


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
        say(f"rollyard-trainer: {error}")
        return USAGE
    sys.stdout.write(f"{needed}\n")
    return OK
