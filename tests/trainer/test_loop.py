"""The decoder writes what the model says, the loop trains on what it should, the toy is sound."""

# pyright: basic, reportMissingImports=false

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rollyard import RunResult
from rollyard_trainer import cli, loop, monitors, roc, template, terminal
from rollyard_trainer.engines import Sampling
from rollyard_trainer.engines.tiny import TinyEngine, TinyGPT
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.roc import ToolCall
from rollyard_trainer.toy import arms, report, tables, task
from rollyard_trainer.toy.run import append_result, experiment, read_results, save_settings
from rollyard_trainer.trajectory import Trajectory

LEXICON = task.Lexicon()
QUICK = arms.Settings(
    steps=2,
    prompts=4,
    keep=2,
    coldstart_steps=30,
    coldstart_examples=100,
    validate_every=1,
    validation_problems=20,
    test_problems=30,
    test_samples=2,
)


def new_model(seed: int = 0) -> TinyGPT:
    torch.manual_seed(seed)
    model = arms.new_model(LEXICON)
    for weight in model.parameters():  # blocks start at zero, where attention would go untested
        torch.nn.init.normal_(weight, std=0.3) if weight.ndim > 1 else None
    return model


def inventing(outcome: str = "ok", stdout: str = "12\n") -> PythonToolEnv:
    async def run(code: str, stdin: str) -> RunResult:
        return RunResult(run_id="x", outcome=outcome, stdout=stdout)  # pyright: ignore

    return PythonToolEnv(run=run, fault_retries=0)


async def test_the_cached_decoder_has_the_probabilities_of_the_whole_model() -> None:
    model = new_model()
    prompts = [p.prompt for p in task.splits().train[:12]]
    sampling = Sampling(max_turns=3, max_tokens=60)
    rollouts = await TinyEngine(model, LEXICON, 1).rollout(prompts, inventing(), sampling)
    batch = loop.Batch.of(rollouts)
    now, _ = loop.logprobs(model, batch.ids, 1.0)
    assert float((now - batch.old).detach()[batch.mask].abs().max()) < 1e-3
    for one, prompt in zip(rollouts, prompts, strict=True):
        assert one.prompt_ids == LEXICON.encode(prompt)
        assert LEXICON.decode([i for i, own in zip(one.ids, one.mask, strict=True) if own])
        assert len(one.ids) <= 60
        assert one.stop is not None


async def test_rows_do_not_depend_on_who_is_beside_them() -> None:
    model = new_model()
    sharp = torch.nn.Linear(64, len(LEXICON), bias=False)
    sharp.weight.data = model.head.weight.data * 1e5  # one token has all the probability
    model.head = sharp
    problems = task.splits().train
    sampling = Sampling(max_turns=3, max_tokens=60)
    prompts = [p.prompt for p in problems[:5]] + [problems[7].prompt[:-20]]
    together = await TinyEngine(model, LEXICON, 1).rollout(prompts, inventing(), sampling)
    for prompt, one in zip(prompts, together, strict=True):
        (alone,) = await TinyEngine(model, LEXICON, 2).rollout([prompt], inventing(), sampling)
        assert alone.ids == one.ids


def written(text: str, reward: float | None, *statuses: roc.CallStatus) -> Trajectory:
    one = Trajectory(LEXICON.encode("What is the "))
    ids = LEXICON.encode(text)
    one.wrote(ids, [-1.0] * len(ids), text)
    one.calls = [ToolCall(status) for status in statuses]
    one.reward = reward
    one.stop = "infra" if "infra_error" in statuses else "answer"
    return one


ANSWER = task.answer_turn("7", twice=False)


def test_failed_rollouts_leave_before_the_mean_and_are_never_scored_0() -> None:
    config, metrics = loop.Config(keep=2), dict[str, float]()
    group = [written(ANSWER, 1.0, "ok"), written(ANSWER, 0.0, "ok")]
    group += [written(ANSWER, None, "infra_error") for _ in range(2)]
    chosen = loop.choose(group, config, np.random.default_rng(0), metrics)
    assert chosen is not None
    rollouts, gains = chosen
    assert {one.reward for one in rollouts} == {0.0, 1.0}
    assert abs(gains.sum()) < 1e-9
    assert metrics["lost_infra"] == 2
    unverifiable = [written(ANSWER, None, "ok") for _ in range(4)]
    assert loop.choose(unverifiable, config, np.random.default_rng(0), metrics) is None


def test_groups_of_equal_reward_are_rejected_and_lost_ones_are_counted() -> None:
    metrics, rng = dict[str, float](), np.random.default_rng(0)
    same = [written(ANSWER, 1.0, "ok") for _ in range(4)]
    assert loop.choose(same, loop.Config(keep=2), rng, metrics) is None
    assert metrics["equal"] == 1
    literal = loop.Config(keep=2, rule=roc.Rule(keep_one=False))
    one_failure = [written(ANSWER, 0.0, "ok"), *same[:3]]
    assert loop.choose(one_failure, literal, rng, metrics) is None
    assert metrics["lost_by_selection"] == 1
    assert loop.choose(one_failure, loop.Config(keep=2), rng, metrics) is not None


async def test_the_toy_scores_what_is_no_integer_as_wrong() -> None:
    problem = task.splits().train[0]
    right = written(task.answer_turn(problem.answer, twice=False), None, "ok")
    garbage = written(task.answer_turn("1 + (", twice=False), None, "ok")
    assert await arms.score(right, problem) == 1.0
    assert await arms.score(garbage, problem) == 0.0


def test_micro_batches_give_the_same_update() -> None:
    group = [written(ANSWER * (1 + i % 2), float(i % 2), "ok") for i in range(8)]
    after: list[torch.Tensor] = []
    for micro_rows in (1, 3, 8):
        model, config = new_model(), loop.Config(keep=4, micro_rows=micro_rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = loop.choose(group, config, np.random.default_rng(1), {})
        assert chosen is not None
        loop.update(model, optimizer, [chosen], config, {})
        after.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert torch.allclose(after[0], after[1], atol=1e-5)
    assert torch.allclose(after[0], after[2], atol=1e-5)


def test_an_update_makes_success_likelier_and_one_update_never_clips() -> None:
    model = new_model()
    config = loop.Config(keep=2)
    good, bad = written(ANSWER, 1.0, "ok"), written(task.LOOP * 3, 0.0, "ok")
    for one in (good, bad):
        batch = loop.Batch.of([one])
        now, _ = loop.logprobs(model, batch.ids, 1.0)
        one.logprobs = now[batch.mask].tolist()
    before = sum(good.logprobs)
    every = loop.Config(keep=2, oversample=1, rule=roc.Rule(select="all"))
    chosen = loop.choose([good, bad], every, np.random.default_rng(0), {})
    assert chosen is not None
    metrics: dict[str, float] = {}
    loop.update(model, torch.optim.SGD(model.parameters(), lr=0.05), [chosen], config, metrics)
    assert metrics["clip_fraction"] == 0
    batch = loop.Batch.of([good])
    now, _ = loop.logprobs(model, batch.ids, 1.0)
    assert float(now.detach()[batch.mask].sum()) > before


def test_gaming_is_counted() -> None:
    assert monitors.is_vacuous("print(1)")
    assert monitors.is_vacuous("x = 5\nprint(x)")
    assert not monitors.is_vacuous("print(2 * 3)")
    assert not monitors.is_vacuous("import math\nprint(math.gcd(4, 6))")
    assert monitors.is_swallowed("try:\n f()\nexcept: pass")
    assert monitors.is_swallowed("try:\n f()\nexcept Exception:\n x = 1")
    assert not monitors.is_swallowed("try:\n f()\nexcept Exception:\n raise")
    assert not monitors.is_swallowed("try:\n f()\nexcept ValueError:\n pass")
    assert not monitors.is_swallowed("not python (")
    one = written(ANSWER, 1.0)
    one.calls = [ToolCall("ok", "1", "print(1)"), ToolCall("exec_error", "", "1/0")]
    one.calls += [ToolCall("ok", "", "try:\n f()\nexcept: pass"), ToolCall("ok", "", "print(2*3)")]
    seen = monitors.describe([one, written(ANSWER, None, "infra_error")])
    assert seen["error_share"] == 0.25
    assert seen["error_share_honest"] == pytest.approx(2 / 3)
    assert (seen["vacuous"], seen["swallowed"], seen["infra"]) == (0.25, 0.25, 0.5)


def test_the_guard_stops_by_its_rule() -> None:
    guard = monitors.CollapseGuard(share=0.7, patience=2)
    series = [0.5, 0.8, 0.5, 0.6, 0.5, 0.4]
    says = [guard.collapsed(step, accuracy) for step, accuracy in enumerate(series)]
    assert says == [False, False, False, False, False, True]
    assert guard.best_step == 1


def test_forking_tokens_are_where_the_policy_hesitates() -> None:
    entropies = np.array([0.0, 2.0, 0.1, 1.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    ids = np.array([1, 7, 1, 7, 1, 1, 1, 1, 1, 1])
    assert monitors.forking_tokens(entropies, ids) == [(7, pytest.approx(1.95), 2)]


def test_splits_share_no_problem_and_words_are_even() -> None:
    sets = task.splits()
    everything = [*sets.train, *sets.validation, *sets.test]
    assert len(everything) == len(set(everything)) == 24 * 20 * 8
    assert (len(sets.validation), len(sets.test)) == (300, 600)
    meaning = {(p.word, p.operation) for p in everything}
    assert len(meaning) == 24
    assert task.splits() == sets


def test_the_lexicon_covers_all_that_is_demonstrated_and_gives_it_back() -> None:
    chance, problems = random.Random(0), task.splits().train
    for problem in problems[:400]:
        for turn in task.demonstration(problem, task.Habits(), chance):
            turn = turn.replace(template.OBSERVATION, "7")
            ids = LEXICON.encode(turn)
            assert 0 not in ids
            assert ids[-1] == LEXICON.end_id
            assert LEXICON.decode(ids) == turn
        assert 0 not in LEXICON.encode(problem.prompt)
    assert LEXICON.encode("?!zz") == [0]


async def test_an_experiment_runs_resumes_and_reports(address: str, tmp_path: Path) -> None:
    said: list[str] = []
    names = ["roc-full", "roc-substring"]
    await experiment(tmp_path, names[:1], [0], QUICK, address, 0.05, said.append)
    first = read_results(tmp_path, QUICK)
    await experiment(tmp_path, names, [0], QUICK, address, 0.05, said.append)
    rows = read_results(tmp_path, QUICK)
    assert [row["arm"] for row in rows] == names
    assert rows[0] == first[0]
    for row in rows:
        assert len(row["curve"]) == QUICK.steps
        assert np.isfinite([point["accuracy"] for point in row["curve"]]).all()
        assert all(point["tokens"] <= arms.CONTEXT for point in row["curve"])  # per rollout
        assert np.array(row["test_scores"], dtype=float).shape == (30, 2)
        assert row["executed"] <= row["calls"]
        assert row["mismatched"] == 0
        assert 0 < len(row["forks"]) <= 12
    assert read_results(tmp_path, arms.Settings()) == []
    text = tables.arms(report.rows_of(tmp_path, QUICK))
    assert [line.split("|")[1:3] for line in text.splitlines()[2:]] == [
        [f" `{name}` ", " 1 "] for name in names
    ]
    page = report.write_report(tmp_path, QUICK).read_text()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "roc-full" in page
    assert "<svg" in page
    assert any("already in" in text for text in said)


def test_settings_are_compared_by_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of runs made up here: each setting's differences are what was put in."""
    usual, two = arms.Settings(), arms.Settings(turns=2, habits=task.Habits(first_error=0.1))
    assert [tables.name_of(one) for one in (usual, two)] == ["defaults", "turns 2, first_error 0.1"]
    for settings, less in ((two, 0.0), (usual, 0.1)):
        place = tmp_path / settings.digest()
        place.mkdir()
        save_settings(place, settings)
        for arm, share in (("roc-full", 0.3 - less), ("rand-strat", 0.3)):
            for seed in range(3):
                point = {"accuracy": 0.8, "error_share": share, "format_share": 0, "tokens": 20}
                append_result(place, {
                    "arm": arm, "seed": seed, "settings": settings.digest(), "curve": [point] * 12,
                    "test_scores": [[1, 0], [1, 1]],
                    "test": dict.fromkeys(
                        ("error_share", "format_share", "tokens", "calls", "vacuous", "swallowed"),
                        0.0,
                    ) | {"accuracy": 0.75},
                })  # fmt: skip
    made = tables.arms(report.rows_of(tmp_path / usual.digest(), usual)).splitlines()
    assert made[2].startswith("| `rand-strat` | 3 | 0.750 ± 0.000 |")
    assert made[3].startswith("| `roc-full` | 3 | 0.750 ± 0.000 |")
    assert made[3].endswith("-0.100 [-0.100, -0.100] |")
    picture = tmp_path / "sweep.png"
    assert cli.toy_sweep(*sorted(tmp_path.iterdir()), picture=picture) == terminal.OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| defaults | 3 | rand-strat | +0.000")
    assert lines[2].count("-0.100 [-0.100, -0.100]") == 3
    assert lines[3].startswith("| turns 2, first_error 0.1 | 3 | rand-strat | +0.000")
    assert lines[3].count("+0.000 [+0.000, +0.000]") == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.toy_sweep(tmp_path, picture=tmp_path / "nothing" / "a.png") == terminal.USAGE
    assert cli.toy_sweep(tmp_path / "nothing") == terminal.USAGE
    assert "settings-*.json" in capsys.readouterr().err
    (place / "settings-x.json").write_text('{"habits": {}, "depth": 3}')
    assert cli.toy_sweep(place) == terminal.USAGE
    assert "not of this version" in capsys.readouterr().err


def test_one_setting_in_two_directories_is_one(tmp_path: Path) -> None:
    for number in range(2):
        place = tmp_path / str(number)
        place.mkdir()
        save_settings(place, arms.Settings())
        for arm in ("roc-full", "grpo-2G"):
            row = {"arm": arm, "seed": number, "settings": arms.Settings().digest()}
            append_result(place, row)
    [(name, rows)] = tables.read(list(tmp_path.iterdir()))
    assert name == "defaults"
    assert {arm: set(runs) for arm, runs in rows.items()} == {
        "roc-full": {0, 1}, "grpo-2G": {0, 1},
    }  # fmt: skip


def test_a_page_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished run"):
        report.write_report(tmp_path, QUICK)


def test_figures_at_equal_accuracy_are_interpolated() -> None:
    curve = [{"accuracy": a, "error_share": e} for a, e in [(0.2, 0.4)] * 5 + [(0.8, 0.1)] * 20]
    assert report.at_accuracy({"curve": curve}, 0.5) == pytest.approx(0.25)
    assert np.isnan(report.at_accuracy({"curve": curve}, 0.9))
