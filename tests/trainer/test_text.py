"""What the policy reads and how its calls are read: parse, template, trajectory, answers."""

import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard_trainer import parse, template, verify
from rollyard_trainer.roc import ToolCall
from rollyard_trainer.trajectory import Trajectory

GOLDEN = """<|im_start|>system
A conversation between User and Assistant. The user asks a question, and the Assistant solves it. \
The Assistant first thinks about the reasoning process in the mind and then provides the user with \
the answer. The reasoning process and answer are enclosed within <reason> </reason> and <answer> \
</answer> tags, respectively, i.e., <reason> reasoning process here </reason><answer> answer here \
</answer>.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
TOOL
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. \
And your final answer will be extracted automatically by the \\boxed{} tag.
This is the problem:
What is 2+2?<|im_end|>
<|im_start|>assistant
<reason>"""


def call(**arguments: object) -> str:
    body = json.dumps({"name": parse.TOOL_NAME, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_the_prompt_is_figure_3() -> None:
    tool = json.dumps(template.TOOL)
    assert template.prompt("What is 2+2?") == GOLDEN.replace("TOOL", tool)
    assert template.TOOL["function"]["name"] == "execute_python_code_with_standard_io"


def test_a_tool_turn_is_golden() -> None:
    assert template.tool_turn(["4", "err"]) == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\nerr\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>"
    )


@given(st.text())
def test_output_cannot_end_its_block_or_start_a_turn(text: str) -> None:
    shown = template.quoted(text)
    assert "<|" not in shown
    assert "</tool_response>" not in shown


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9)))))
def test_a_conversation_only_grows(turns: list[tuple[list[int], list[int]]]) -> None:
    one, before = Trajectory([1, 2, 3]), list[int]()
    for written, given_ids in turns:
        one.wrote(written, [-1.0] * len(written), "w")
        one.read(given_ids, "r")
        assert one.ids[: len(before)] == before
        before = [*one.ids]
    assert len(one.ids) == len(one.mask) == len(one.logprobs)
    assert one.written == sum(len(written) for written, _ in turns)
    assert one.turns == len(turns)
    assert all(score == 0 for score, own in zip(one.logprobs, one.mask, strict=True) if not own)


def test_only_the_policys_answers_count() -> None:
    one = Trajectory([])
    one.wrote([1], [0.0], "x<answer>1</answer>")
    one.read([2], "<answer>printed by a program</answer>")
    one.reward = 1.0
    one.calls.append(ToolCall("ok"))
    assert one.sample().answers == 1
    assert one.sample().calls == (ToolCall("ok"),)


def test_a_rollout_without_a_reward_is_never_a_sample() -> None:
    with pytest.raises(ValueError, match="reward"):
        Trajectory([]).sample()
    assert Trajectory([]).is_infra


def test_calls_are_read_in_order() -> None:
    turn = f"thinking{call(code='print(1)', input='x')} and {call(code='2')}<|im_end|>"
    assert parse.calls(turn) == [parse.Call("print(1)", "x"), parse.Call("2", "")]


def test_a_turn_without_a_call_has_none() -> None:
    assert parse.calls("</reason><answer>\\boxed{4}</answer>") == []


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("<tool_call>{}", "not closed"),
        ("<tool_call>{]</tool_call>", "Expecting"),
        ("<tool_call>[1]</tool_call>", "JSON object"),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "no tool is named 'rm'"),
        (f'<tool_call>{{"name": "{parse.TOOL_NAME}"}}</tool_call>', "arguments"),
        (call(code=3), "strings"),
        (call(code="1", input=None), "strings"),
        (call(), "strings"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "Failed to parse"),
    ],
)
def test_a_malformed_call_says_why(block: str, says: str) -> None:
    (found,) = parse.calls(block)
    assert says in found.error
    assert found.code == ""


def test_a_call_after_an_unclosed_one_is_still_read() -> None:
    first, second = parse.calls("<tool_call>{oops" + call(code="1"))
    assert first.error
    assert second == parse.Call("1")


@given(st.text())
def test_any_text_can_be_parsed(text: str) -> None:
    assert len(parse.calls(f"<tool_call>{text}")) >= 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>\\boxed{4}</answer>", "4"),
        ("<answer>\\boxed{1}</answer> no <answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1} or \\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer> <answer>\\boxed{3}</answer>", "3"),
        ("\\boxed{4}", None),
        ("<answer>4</answer>", None),
        ("<answer>\\boxed{4</answer>", None),
        ("", None),
    ],
)
def test_the_last_boxed_in_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert verify.extract(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [("4", 4), ("-12", -12), ("1,234", 1234), ("$7$", 7), ("4.0", 4), ("4.5", None), ("x", None),
     ("1,23", None), ("10^{3}", None)],
)  # fmt: skip
def test_integers_are_read(text: str, number: int | None) -> None:
    assert verify.as_integer(text) == number


Check = Callable[[str, str], Awaitable[verify.Verdict]]


@pytest.mark.parametrize(
    ("answer", "gold", "verdict", "reward"),
    [
        ("<answer>\\boxed{1,234}</answer>", "1234", "correct", 1.0),
        ("<answer>\\boxed{5}</answer>", "4", "wrong", 0.0),
        ("4", "4", "no_answer", 0.0),
        ("<answer>\\boxed{x}</answer>", "x", "correct", 1.0),
        ("<answer>\\boxed{2x}</answer>", "x+x", "unverifiable", None),
    ],
)
async def test_unverifiable_is_not_wrong(
    answer: str, gold: str, verdict: verify.Verdict, reward: float | None
) -> None:
    assert await verify.check(answer, gold) == verdict
    assert verify.reward(verdict) == reward
