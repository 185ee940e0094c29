"""Configurations load into what they configure; adapters select as the loop does."""

from pathlib import Path
from typing import Any

import pytest

from rollyard import Client
from rollyard_trainer import loop, recipe
from rollyard_trainer.adapters.trl import PythonEnvironment, RocReward
from rollyard_trainer.engines import Sampling


@pytest.mark.parametrize("name", recipe.NAMES)
def test_every_configuration_is_of_known_fields(name: str) -> None:
    for stage in recipe.read(name):
        config = loop.Config(**stage.train, sampling=Sampling(**stage.sampling))
        assert config.keep * config.oversample == (32 if name.startswith("stage") else 16)
        assert stage.untested == (name != "laptop")


def test_the_papers_stages_add_up() -> None:
    stages = [stage for i in (1, 2, 3) for stage in recipe.read(f"stage{i}")]
    assert sum(stage.steps for stage in stages) == 510
    assert [stage.sampling["max_turns"] for stage in stages] == [10, 10, 15]
    assert stages[0].rate_at(0) == pytest.approx(1e-6 / 20)
    assert stages[0].rate_at(19) == stages[0].rate_at(299) == 1e-6


def test_tables_of_a_stage_fall_back_to_those_of_the_file() -> None:
    first, second = recipe.read("laptop")
    assert first.model == second.model == "tiny"
    assert first.sampling["max_tokens"] < second.sampling["max_tokens"]
    assert (first.drop_always_solved, second.drop_always_solved) == (0, 8)
    assert first.train == second.train


def test_a_typo_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("untested = true\nlerning_rate = 1\n")
    with pytest.raises(ValueError, match="lerning_rate"):
        recipe.read(path)
    path.write_text("untested = true\n")
    with pytest.raises(ValueError, match="model"):
        recipe.read(path)


def rows(address: str | None, programs: list[str]) -> list[PythonEnvironment]:
    class Environment(PythonEnvironment):
        client = Client(address or "http://127.0.0.1:9", max_retries=0 if address is None else 8)

    made: list[PythonEnvironment] = []
    for program in programs:
        one = Environment()
        one.reset()
        one.execute_python_code_with_standard_io(program)
        made.append(one)
    assert Environment.client is not None
    Environment.client.close()
    return made


def test_trl_rewards_are_none_for_what_is_not_selected(address: str) -> None:
    environments = rows(address, ["print(1)"] * 3 + ["1/0"] + ["print(0)"] * 4)
    score: list[float | None] = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]

    def correct(**_: Any) -> list[float | None]:
        return score

    answer = [{"role": "assistant", "content": "<answer>\\boxed{1}</answer>"}]
    seen = [0] * 8
    for seed in range(200):
        reward = RocReward(correct, num_generations=8, seed=seed)
        got = reward(prompts=["q"] * 8, completions=[answer] * 8, environments=environments)
        assert sum(one is not None for one in got) == 4
        assert all(one in (None, score[row]) for row, one in enumerate(got))
        assert sum(one == 0 for one in got) == 2
        seen = [n + (one is not None) for n, one in zip(seen, got, strict=True)]
    assert seen[3] < min(seen[:3]) / 2  # the one whose call failed


def test_trl_rows_that_the_service_failed_are_none(address: str) -> None:
    fine, failed = rows(address, ["print(1)"] * 6), rows(None, ["print(1)"] * 2)

    def score(**_: Any) -> list[float | None]:
        return [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]

    def same(**_: Any) -> list[float | None]:
        return [1.0] * 8

    reward = RocReward(score, num_generations=8, keep=8)
    got = reward(prompts=["q"] * 8, completions=["<answer>"] * 8, environments=fine + failed)
    assert got == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None, None]
    equal = RocReward(same, num_generations=8)
    assert equal(prompts=["q"] * 8, completions=[""] * 8, environments=fine + failed) == [None] * 8


@pytest.mark.parametrize(
    ("prompts", "says"), [(["q"] * 3, "whole groups"), (["q", "p"], "prompts")]
)
def test_trl_groups_that_are_split_are_refused(prompts: list[str], says: str) -> None:
    count = len(prompts)

    def same(**_: Any) -> list[float | None]:
        return [1.0] * count

    reward = RocReward(same, num_generations=2)
    with pytest.raises(ValueError, match=says):
        reward(
            prompts=prompts, completions=[""] * count, environments=[PythonEnvironment()] * count
        )
