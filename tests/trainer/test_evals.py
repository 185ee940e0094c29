"""Intervals that cover, results that may be compared, and a model measured over HTTP."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollyard_trainer import cli, cli_eval, parse, template, terminal
from rollyard_trainer.engines import Sampling
from rollyard_trainer.engines.openai import ModelError, OpenAIEngine
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.evals.protocol import NotComparable, Protocol, Result, read_problems, table
from rollyard_trainer.evals.statistics import (
    average_at_k,
    difference,
    paired,
    problems_needed,
    student,
)

PROTOCOL = Protocol(
    problems="p", template="t", image="i", tools=True, turns=3, max_tokens=99, temperature=1.0, k=4,
    timeout_s=1.0, memory_bytes=1 << 27, api="completions",
)  # fmt: skip


def scores(rng: np.random.Generator, mean: float, problems: int = 60, k: int = 8) -> np.ndarray:
    hardness = rng.beta(4 * mean, 4 * (1 - mean), size=(1, problems, 1))
    return (rng.random((1, problems, k)) < hardness).astype(float)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(40):
        interval = average_at_k(scores(rng, 0.7, problems=30, k=4))
        covered += interval.low <= 0.7 <= interval.high
    assert covered >= 33  # 38 expected; fewer than 33 has a chance below 1 in 100


def test_pairing_by_problem_makes_the_interval_narrower() -> None:
    rng = np.random.default_rng(1)
    hardness = rng.random((1, 100, 1))
    left = (rng.random((1, 100, 16)) < hardness).astype(float)
    right = (rng.random((1, 100, 16)) < hardness * 0.8).astype(float)
    close = difference(left, right)
    shuffled = difference(left, right[:, rng.permutation(100)])
    assert close.low > 0
    assert close.high - close.low < shuffled.high - shuffled.low


def test_student_has_the_tables_values() -> None:
    table = {1: 12.706, 2: 4.303, 7: 2.365, 30: 2.042}
    assert {n: round(student(n), 3) for n in table} == pytest.approx(table, abs=2e-3)


@pytest.mark.parametrize("pairs", [2, 3, 8])
def test_intervals_of_few_seeds_hold_the_truth_as_often_as_they_say(pairs: int) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        one = paired(rng.normal(size=pairs).tolist(), [0.0] * pairs)
        held += one.low <= 0 <= one.high
    assert 0.9 < held / 400 < 0.99


def test_one_pair_has_no_interval() -> None:
    one = paired([1.0, float("nan")], [0.5, 0.1])
    assert (one.value, np.isnan(one.low), np.isnan(one.high)) == (0.5, True, True)


def test_what_is_not_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="not paired"):
        difference(np.zeros((1, 3, 2)), np.zeros((1, 4, 2)))


def test_failed_samples_count_nowhere() -> None:
    array = np.array([[[1.0, np.nan], [1.0, 1.0], [1.0, np.nan]]])
    assert average_at_k(array).value == 1.0
    assert paired([1.0, float("nan")], [0.5, 0.1]).value == 0.5


def test_power_says_more_problems_for_less() -> None:
    assert problems_needed(0.02, accuracy=0.8) > 4 * problems_needed(0.05, accuracy=0.8)
    assert problems_needed(0.05, accuracy=0.8, k=1) > problems_needed(0.05, accuracy=0.8, k=16)
    # Thirty problems, as AIME has, do not show 5 points.
    assert problems_needed(0.05, accuracy=0.8) > 30
    with pytest.raises(ValueError, match="between 0 and 1"):
        problems_needed(0, accuracy=0.8)


def test_power_is_right_by_simulation() -> None:
    rng, gap, k = np.random.default_rng(2), 0.08, 8
    count = problems_needed(gap, accuracy=0.6, k=k, correlation=0.0, within=0.5)
    found = 0
    for _ in range(200):
        # Beta with a + b = 1 puts half of the variance between problems.
        left = rng.binomial(k, rng.beta(0.64, 0.36, count)) / k
        right = rng.binomial(k, rng.beta(0.56, 0.44, count)) / k
        delta = left - right
        found += delta.mean() / (delta.std(ddof=1) / np.sqrt(count)) > 1.96
    assert 0.7 < found / 200 < 0.9


@pytest.mark.parametrize("name", [name for name in asdict(PROTOCOL) if name != "tools"])
def test_results_of_different_protocols_are_not_tabulated(name: str, tmp_path: Path) -> None:
    value: Any = asdict(PROTOCOL)[name]
    other = Protocol(**{**asdict(PROTOCOL), name: value * 2})
    assert other.digest() != PROTOCOL.digest()
    results = [Result("a", PROTOCOL, [[1.0]], {}), Result("b", other, [[1.0]], {})]
    with pytest.raises(NotComparable, match=name):
        table(results)
    for result in results:
        result.write(tmp_path / result.model)
    assert cli_eval.compare([tmp_path / "a", tmp_path / "b"]) == terminal.USAGE


def test_a_table_has_intervals(tmp_path: Path) -> None:
    left = Result("left", PROTOCOL, [[1.0, 0.0, None, 1.0]] * 20, {})
    left.write(tmp_path / "left.json")
    assert Result.read(tmp_path / "left.json") == left
    text = table([left, Result("right", PROTOCOL, [[0.0, 0.0, 0.0, 1.0]] * 20, {})])
    assert "0.667 [" in text
    assert "-0.417 [" in text


@pytest.mark.parametrize("line", ['{"problem": "x"}', "nonsense", "[]"])
def test_a_malformed_problem_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": "1+1", "answer": 2}\n' + line)
    with pytest.raises(ValueError, match=r"problems\.jsonl:2"):
        read_problems(path)


class Model(BaseHTTPRequestHandler):
    """A served policy: asks the tool for 6*7, then answers what it read."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012
    refusals = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append(body)
        chat = self.path.endswith("chat/completions")
        if type(self).refusals > 0:
            type(self).refusals -= 1
            self.send_error(503)
            return
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        call = json.dumps({"name": parse.TOOL_NAME, "arguments": {"code": "print(6*7)"}})
        says = f"</reason>\n<tool_call>\n{call}\n</tool_call>"
        if "<tool_response>" in text:
            said = text.rpartition("<tool_response>\n")[2].partition("\n")[0]
            says = f"</reason>\n<answer>\\boxed{{{said}}}</answer>"
        elif "# Tools" not in json.dumps(body):
            says = "</reason>\n<answer>\\boxed{41}</answer>"
        choice = {"finish_reason": "stop", "text": says, "message": {"content": says}}
        reply = json.dumps({"choices": [choice], "usage": {"completion_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def model_url() -> Iterator[str]:
    Model.seen, Model.refusals = [], 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("api", "tools", "accuracy"),
    [("completions", True, 0.5), ("chat", True, 0.5), ("completions", False, 0.0)],
)
def test_a_model_is_measured_over_http_with_real_tool_calls(
    api: str, tools: bool, accuracy: float, model_url: str, address: str, tmp_path: Path
) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"problem": "6 times 7", "answer": "42"}, {"problem": "6 plus 7", "answer": "13"}]
    problems.write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "out.json"
    code = cli_eval.evaluate(
        problems, model="m", model_url=(model_url,), model_key=None, out=out, k=2, base_url=address,
        api=api, tools=tools,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    assert code == 0
    result = Result.read(out)
    assert np.nanmean(result.array()) == accuracy
    assert re.fullmatch(r"[\w.-]+-[0-9a-f]{12}", result.protocol.image)
    assert result.details["calls"] == (1 if tools else 0)
    if api == "chat":
        assert [m["role"] for m in Model.seen[-1]["messages"]] == [
            "system", "user", "assistant", "user",
        ]  # fmt: skip
        asked = [body["messages"][:2] for body in Model.seen]
        assert asked.count(template.messages("6 plus 7")) == 4  # two samples of two turns


async def test_refusals_are_retried_and_then_named(model_url: str) -> None:
    env = PythonToolEnv(run=None)  # pyright: ignore[reportArgumentType] - makes no call
    async with OpenAIEngine(model_url, "m") as engine:
        Model.refusals = 1
        prompts = [template.prompt("x", tools=False)]
        (one,) = await engine.rollout(prompts, env, Sampling(max_turns=1))
        assert one.stop == "answer"
        assert len(Model.seen) == 2
    async with OpenAIEngine("http://127.0.0.1:9/v1", "m", retries=1) as engine:
        with pytest.raises(ExceptionGroup) as caught:
            await engine.rollout(prompts, env, Sampling(max_turns=1))
    assert caught.group_contains(ModelError, match="ConnectError")


def test_wrong_usage_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_eval.evaluate(tmp_path / "none.jsonl", model="m") == terminal.USAGE
    assert cli.toy(out=tmp_path, arms="roc-ful") == terminal.USAGE
    assert cli_eval.power(2.0) == terminal.USAGE
    said = capsys.readouterr().err
    assert "none.jsonl" in said
    assert "unknown arm 'roc-ful'; known: grpo-G" in said
    assert "between 0 and 1" in said


def test_small_commands_print_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_eval.power(0.05) == cli.schedule(rollouts=16) == cli.toy_arms() == 0
    shown = capsys.readouterr().out
    assert "reserve 8192 (worst case)" in shown
    assert "rand-strat" in shown
