"""The experiment: one cold start, then every arm with every seed; results are appended."""

# pyright: basic, reportMissingImports=false

import fcntl
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rollyard import AsyncClient, Limits
from rollyard_trainer import sft
from rollyard_trainer.env import PythonToolEnv, service
from rollyard_trainer.toy import coldstart, task
from rollyard_trainer.toy.arms import Settings, new_model, run_arm
from rollyard_trainer.toy.memo import Memo

LIMITS = Limits(timeout_s=1.0, memory_bytes=128 << 20)


def read_results(directory: Path, settings: Settings | None = None) -> list[dict[str, Any]]:
    """All finished runs in ``directory``, of these settings only if any are given."""
    path = directory / "results.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [row for row in rows if settings is None or row["settings"] == settings.digest()]


def save_settings(directory: Path, settings: Settings) -> None:
    """Say what a digest in the results of ``directory`` stands for."""
    path = directory / f"settings-{settings.digest()}.json"
    path.write_text(json.dumps(asdict(settings)))


def read_settings(directory: Path) -> list[Settings]:
    """Settings under which experiments in ``directory`` were begun.

    Raises:
        ValueError: there are none, or they are of another version.
    """
    found: list[Settings] = []
    for path in sorted(directory.glob("settings-*.json")):
        try:
            fields = json.loads(path.read_text())
            found.append(Settings(**{**fields, "habits": task.Habits(**fields["habits"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not of this version: {error}") from None
    if not found:
        raise ValueError(
            f"{directory} has no settings-*.json: its command, given again, writes it and goes on"
        )
    return found


def append_result(directory: Path, row: dict[str, Any]) -> None:
    """Add one finished run; several processes may write to one directory."""
    with (directory / "results.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


async def cold_start(
    directory: Path, settings: Settings, memo: Memo, lexicon: task.Lexicon,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """The weights from which every arm and seed starts; made once, then read from ``directory``."""
    path = directory / f"coldstart-{settings.coldstart_digest()}.pt"
    with (directory / "coldstart.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            torch.manual_seed(0)
            model, env = new_model(lexicon), PythonToolEnv(run=memo, traceback=False)
            examples = await coldstart.demonstrations(
                settings.splits().train, settings.coldstart_examples, settings.habits, env, lexicon,
                0, say,
            )  # fmt: skip
            sft.imitate(model, examples, settings.coldstart_steps, 0, say)
            part = path.with_suffix(".part")
            torch.save(model.state_dict(), part)
            part.rename(path)
    return torch.load(path, weights_only=True)


async def experiment(
    directory: Path, arms: Sequence[str], seeds: Sequence[int], settings: Settings,
    base_url: str | None, recheck: float, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Run what is not yet in ``directory``; interrupted, the same call continues.

    Raises:
        RollyardError: the service cannot be reached.
    """
    directory.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    save_settings(directory, settings)
    done = {(row["arm"], row["seed"]) for row in read_results(directory, settings)}
    # Seeds outside, arms inside: an interrupted experiment has whole seeds, which are paired.
    wanted = [(arm, seed) for seed in seeds for arm in arms if (arm, seed) not in done]
    say(f"{len(wanted)} runs to do, {len(arms) * len(seeds) - len(wanted)} already in {directory}")
    lexicon = task.Lexicon()
    async with AsyncClient(base_url, job="toy") as client:
        await client.run("pass")  # a service that is not there is said now, not after minutes
        memo = Memo(service(client, limits=LIMITS, job="toy"), recheck=recheck)
        start = await cold_start(directory, settings, memo, lexicon, say)
        began = time.monotonic()
        for number, (arm, seed) in enumerate(wanted, start=1):
            row = await run_arm(arm, seed, settings, start, memo, lexicon, say)
            append_result(directory, row)
            left_s = (time.monotonic() - began) / number * (len(wanted) - number)
            say(
                f"run {number} of {len(wanted)} took {row['wall_s']:.0f} s, "
                f"test accuracy {row['test']['accuracy']:.3f}; {left_s / 60:.0f} min left"
            )
