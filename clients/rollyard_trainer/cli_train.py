"""``rollyard-trainer train``, and problems to try it on."""

import asyncio
from pathlib import Path

from rollyard import AsyncClient, Limits, RollyardError
from rollyard_trainer.terminal import COLLAPSED, OK, OURS, USAGE, Url, say, torch_or_exit


def train(
    problems: Path,
    *,
    config: list[str],
    validation: Path | None = None,
    demonstrations: Path | None = None,
    out: Path = Path("run"),
    seed: int = 0,
    timeout_s: float = 10.0,
    memory_bytes: int = 512 << 20,
    base_url: Url = None,
) -> int:
    """Train a policy with GRPO-RoC, stage after stage, tool calls through a running service.

    Try it: `rollyard up`, `rollyard-trainer toy-data data`, then `rollyard-trainer train
    data/train.jsonl --validation data/validation.jsonl --demonstrations data/demonstrations.jsonl
    --config laptop`. A configuration names the model: "tiny", or one of transformers, by directory
    or hub name. Larger ones are trained by TRL or verl; see the adapters.

    OUT gets metrics.jsonl (a line per step and per validation), last.pt, best.pt and final/.
    Interrupted, the same command continues. Exit code 4: the policy collapsed on the validation
    problems by the configuration's rule, and final/ is the best one.

    Args:
        problems: JSONL, each line {"problem": "…", "answer": "…"}.
        config: Stages in sequence: names (stage1, stage2, stage3, gpu1, laptop) or TOML files; may
            be given several times.
        validation: Problems, as above, that decide on collapse. Never the test problems.
        demonstrations: JSONL, each line {"problem": "…", "turns": ["…", "…"]}; {observation} in a
            turn stands for what the call before returned. For stages with [sft].
        seed: Of everything.
        timeout_s: Of each tool call.
        memory_bytes: Of each tool call.
        base_url: The service; default: ROLLYARD_URL, else the one of `rollyard up`.
    """
    torch_or_exit()
    from rollyard_trainer import recipe
    from rollyard_trainer.env import service
    from rollyard_trainer.evals.protocol import read_problems
    from rollyard_trainer.sft import read_demonstrations
    from rollyard_trainer.train import Data, Training, questions

    async def run() -> str:
        stages = [stage for name in config for stage in recipe.read(name)]
        rows, digest = read_problems(problems)
        settings = {"problems": digest}
        held: list[tuple[str, str]] = []
        if validation is None:
            say("no --validation: nothing will stop a policy that collapses")
        else:
            others, settings["validation"] = read_problems(validation)
            held = [(row.question, row.answer) for row in others]
        if shared := {row.question for row in rows} & {question for question, _ in held}:
            raise ValueError(f"{len(shared)} problems are both trained and validated on")
        data = Data(
            train=questions([(row.question, row.answer) for row in rows]),
            validation=questions(held),
            demonstrations=read_demonstrations(demonstrations) if demonstrations else (),
        )
        limits = Limits(timeout_s=timeout_s, memory_bytes=memory_bytes)
        async with AsyncClient(base_url, job="train", max_retries=1) as first:
            await first.run("pass")  # a service that is not there is said now
        async with AsyncClient(base_url, job="train") as client:
            runner = service(client, limits=limits, job="train")
            training = Training(stages, data, runner, out, seed, say, settings)
            return (await training.finish()).ended

    try:
        ended = asyncio.run(run())
    except RollyardError as error:
        say(f"rollyard-trainer: {error}\nIs the service running? Start it with: rollyard up")
        return OURS
    except ImportError as error:
        say(f"rollyard-trainer: {error}\nFor such models: pip install 'rollyard[trainer-hf]'")
        return OURS
    except (OSError, ValueError) as error:
        say(f"rollyard-trainer: {error}")
        return USAGE
    say(f"{ended}; the policy is in {out / 'final'}")
    return OK if ended == "done" else COLLAPSED


def plot(run: Path) -> int:
    """Draw the curves of a training run, also of one that is under way, as RUN/metrics.png.

    Args:
        run: What was --out of `rollyard-trainer train`.
    """
    from rollyard_trainer import plot

    try:
        say(f"written: {plot.plot(run)}")
    except (OSError, ValueError) as error:
        say(f"rollyard-trainer: {error}")
        return USAGE
    return OK


def toy_data(directory: Path, *, demonstrations: int = 2000, seed: int = 0) -> int:
    """Write the toy's problems and demonstrations as files, to try `rollyard-trainer train` on.

    Args:
        directory: Gets train.jsonl, validation.jsonl, test.jsonl and demonstrations.jsonl.
        demonstrations: How many.
        seed: Of what is in which file, and of the demonstrations.
    """
    from rollyard_trainer.toy.task import write_files

    write_files(directory, demonstrations, seed)
    say(f"written to {directory}")
    return OK
