"""A whole training run from files: stages, metrics, resumption, collapse; calls are really run."""

# pyright: basic, reportMissingImports=false

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rollyard import AsyncClient
from rollyard_trainer import cli_train, recipe, terminal
from rollyard_trainer.engines.pieces import pieces_of
from rollyard_trainer.env import service
from rollyard_trainer.parse import TOOL_NAME
from rollyard_trainer.sft import read_demonstrations
from rollyard_trainer.train import Data, Training, questions

CONFIG = """
untested = false
model = "tiny"
prompts = 4
rate = 1e-3
warmup_steps = 2
reset_optimizer = false
drop_always_solved = 0
validate_every = 2
tiny = { width = 32, layers = 1, heads = 2, context = 160 }
train = { keep = 4, oversample = 2, rule = { epsilon = 0.2 } }
env = { traceback = false, max_chars = 60 }

[[stage]]
steps = 2
sampling = { max_turns = 2, max_tokens = 80 }
sft = { steps = 60, rows = 16, rate = 1e-2 }

[[stage]]
steps = 3
reset_optimizer = true
drop_always_solved = 2
sampling = { max_turns = 3, max_tokens = 120 }
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Problems that nobody can solve but by guessing one of two answers, and how it looks."""
    chance = random.Random(0)
    for name, numbers in (("train", range(24)), ("validation", range(30, 42))):
        rows = [{"problem": f"Which is {n}?", "answer": str(7 + n % 2)} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = []
    for _ in range(200):
        digit = chance.choice("78")
        code = json.dumps({"name": TOOL_NAME, "arguments": {"code": f"print({digit})",
                                                            "input": ""}})  # fmt: skip
        call = f"</reason>\n<tool_call>\n{code}\n</tool_call>"
        answer = "</reason>\n<answer>\\boxed{{observation}}</answer>"
        shown.append({"problem": f"Which is {chance.randrange(24)}?", "turns": [call, answer]})
    rows = "".join(json.dumps(row) + "\n" for row in shown)
    (tmp_path / "demonstrations.jsonl").write_text(rows)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def start(files: Path, address: str, out: Path, config: str = "config.toml") -> int:
    return cli_train.train(
        files / "train.jsonl", config=[str(files / config)], out=out, base_url=address,
        validation=files / "validation.jsonl", demonstrations=files / "demonstrations.jsonl",
        timeout_s=2,
    )  # fmt: skip


def weights(out: Path) -> torch.Tensor:
    saved = torch.load(out / "final" / "weights.pt", weights_only=True)
    return torch.cat([weight.flatten() for weight in saved.values()])


def test_a_run_goes_through_its_stages_and_goes_on_where_it_was_stopped(
    files: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = files / "whole", files / "parts"
    assert start(files, address, whole) == terminal.OK
    rows = metrics(whole)
    steps = [row for row in rows if row["event"] == "step"]
    assert [(row["stage"], row["step"]) for row in steps] == [
        (1, 0), (1, 1), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    assert [row["rate"] for row in steps] == pytest.approx([5e-4, 1e-3, 5e-4, 1e-3, 1e-3])
    checked = [row for row in rows if row["event"] == "validation"]
    assert [row["total"] for row in checked] == [0, 2, 4, 5]
    assert checked[0]["calls"] > 0.5  # imitation taught it to call
    assert steps[0]["trained_tokens"] > 0
    (dropped,) = (row for row in rows if row["event"] == "dropped")
    assert 0 < dropped["left"] <= dropped["before"] == 24

    def interrupted(text: str) -> None:
        if "stage 2 of 2, step 2" in text:  # made, but not yet in a checkpoint
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cli_train, "say", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(files, address, parts)
    assert metrics(parts)[-1]["total"] == 3
    assert start(files, address, parts) == terminal.OK
    assert torch.equal(weights(parts), weights(whole))
    seen = [{k: v for k, v in row.items() if k != "wall_s"} for row in metrics(parts)]
    assert seen == [{k: v for k, v in row.items() if k != "wall_s"} for row in rows]
    assert start(files, address, parts) == terminal.OK  # finished: nothing is made again
    assert len(metrics(parts)) == len(rows)
    assert cli_train.plot(parts) == terminal.OK
    assert (parts / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert cli_train.plot(files) == terminal.USAGE


def test_an_interrupted_cold_start_goes_on_too(
    files: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (files / "config.toml").read_text().replace("sft = { steps = 60", "sft = { steps = 150")
    (files / "config.toml").write_text(text.partition("[[stage]]\nsteps = 3")[0])
    whole, parts = files / "whole", files / "parts"
    assert start(files, address, whole) == terminal.OK
    said: list[str] = []

    def interrupted(text: str) -> None:
        said.append(text)
        ends = text.startswith(("cold start: step 150", "validation after step 0"))
        if ends and said.count(text) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cli_train, "say", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                start(files, address, parts)
            assert (parts / "imitation.pt").exists()
    assert "cold start: continuing after step 100 of 150" in said
    assert start(files, address, parts) == terminal.OK
    assert torch.equal(weights(parts), weights(whole))
    assert not (parts / "imitation.pt").exists()


async def test_a_collapse_goes_back_to_the_best_and_ends_the_run(
    files: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONFIG.replace("rate = 1e-3", "rate = 3.0").replace("steps = 2\n", "steps = 20\n")
    (files / "wild.toml").write_text(text.replace("validate_every = 2", "validate_every = 1"))
    stages = recipe.read(files / "wild.toml")
    said: list[str] = []
    problems = [(f"Which is {n}?", str(7 + n % 2)) for n in range(24)]
    async with AsyncClient(address) as client:
        data = Data(
            train=questions(problems),
            validation=questions(problems),
            demonstrations=read_demonstrations(files / "demonstrations.jsonl"),
        )
        training = Training(stages, data, service(client), files / "wild", 0, said.append)
        ended = (await training.finish()).ended
    assert ended.startswith("collapsed at step")
    (row,) = (row for row in metrics(files / "wild") if row["event"] == "collapsed")
    checked = {row["total"]: row["accuracy"] for row in metrics(files / "wild")
               if row["event"] == "validation"}  # fmt: skip
    assert checked[row["back_to"]] == max(checked.values()) > 0
    assert checked[row["total"]] < 0.7 * max(checked.values())
    best = torch.load(files / "wild" / "best.pt", weights_only=True)
    flat = torch.cat([weight.flatten() for weight in best.values()])
    assert torch.equal(weights(files / "wild"), flat)


def test_what_cannot_be_run_is_said(
    files: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = files / "out"
    assert start(files, "http://127.0.0.1:9", out) == terminal.OURS
    assert "rollyard up" in capsys.readouterr().err
    (files / "typo.toml").write_text(CONFIG.replace("keep = 4", "kep = 4"))
    assert start(files, address, out, "typo.toml") == terminal.USAGE
    assert "kep" in capsys.readouterr().err
    (files / "validation.jsonl").write_text((files / "train.jsonl").read_text())
    assert start(files, address, out) == terminal.USAGE
    assert "24 problems are both" in capsys.readouterr().err
    (files / "validation.jsonl").write_text('{"problem": "new", "answer": 7}')
    (files / "demonstrations.jsonl").write_text('{"problem": "x"}\n')
    assert start(files, address, out) == terminal.USAGE
    assert "demonstrations.jsonl:1" in capsys.readouterr().err


def test_a_directory_is_of_one_run(files: Path, address: str, capsys: Any) -> None:
    quick = CONFIG.replace("steps = 60", "steps = 1").replace("steps = 3", "steps = 0")
    (files / "quick.toml").write_text(quick.replace("drop_always_solved = 2\n", ""))
    assert start(files, address, files / "out", "quick.toml") == terminal.OK
    assert start(files, address, files / "out") == terminal.USAGE
    assert "another configuration" in capsys.readouterr().err


def test_pieces_give_any_ascii_text_back() -> None:
    pieces = pieces_of(["What is the lantern?"] * 9)
    assert " lantern" in pieces.pieces
    text = "def f(x):\n    return x['lantern'] ** 2"
    assert pieces.decode(pieces.encode(text)) == text
    assert pieces.encode("é") == [0]
    assert pieces.encode("<|im_end|>") == [pieces.end_id]


def test_toy_data_are_files_for_it(tmp_path: Path) -> None:
    assert cli_train.toy_data(tmp_path, demonstrations=10) == terminal.OK
    rows = read_demonstrations(tmp_path / "demonstrations.jsonl")
    assert len(rows) == 10
    assert all("{observation}" in row.turns[-1] for row in rows)
    names = ("train", "validation", "test")
    asked = [
        {json.loads(line)["problem"] for line in (tmp_path / f"{n}.jsonl").read_text().splitlines()}
        for n in names
    ]
    assert not asked[0] & asked[1] and not asked[0] & asked[2] and not asked[1] & asked[2]
