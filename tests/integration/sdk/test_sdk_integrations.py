"""The tools of ``rollyard.integrations``: what becomes text for a model, and what never does."""

import asyncio
import pickle  # noqa: TID251 - that tools can be pickled is a promise
from types import SimpleNamespace
from typing import Any

import pytest

from rollyard import RunResult
from rollyard.integrations.observation import ServiceFault, observation
from rollyard.integrations.openai_tools import answer_all, answer_tool_calls
from rollyard.integrations.python_tool import AsyncPythonTool, PythonTool
from rollyard.integrations.trl import PythonEnvironment
from rollyard.types import Outcome

from .peer import Json, Peer, refuse


def result(outcome: Outcome = "ok", **fields: Any) -> RunResult:
    return RunResult(run_id="r", outcome=outcome, **fields)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (result(stdout="1\n"), "1"),
        (result(stdout="1\n", stderr="warned\n"), "1\nwarned"),
        (result(), "[no output]"),
        (result("error", stderr="… line 1\nValueError\n", exit_code=1), "… line 1\nValueError"),
        (result("error", exit_code=3, message="exit code 3"), "[error: exit code 3]"),
        (result("timeout", stdout="x", message="limit of 1 s reached"),
         "x\n[timeout: limit of 1 s reached]"),
        # How busy the machine was is another number each time: nothing for a policy to read.
        (result("timeout", message="1 s (163 ms of waiting for a core not counted); 2 killed"),
         "[timeout: 1 s; 2 killed]"),
    ],
)  # fmt: skip
def test_observation(made: RunResult, text: str) -> None:
    assert observation(made) == text


def test_long_observation_loses_its_middle() -> None:
    text = observation(result(stdout="a" * 500 + "b" * 500), max_chars=100)
    assert text == f"{'a' * 50}\n[... 900 characters left out ...]\n{'b' * 50}"


@pytest.mark.parametrize("outcome", ["infra_error", "expired", "cancelled"])
def test_no_observation_of_our_fault(outcome: Outcome) -> None:
    with pytest.raises(ServiceFault, match=outcome) as caught:
        observation(result(outcome, stdout="half"))
    assert not isinstance(caught.value, Exception)  # agent loops would show it to the model
    copy: ServiceFault = pickle.loads(pickle.dumps(caught.value))
    assert (copy.message, copy.cause) == (caught.value.message, caught.value.cause)


def failing(times: int) -> Any:
    left = [times]

    def answer(run: Json) -> Json:
        left[0] -= 1
        outcome = "infra_error" if left[0] >= 0 else "ok"
        return {"run_id": run["run_id"], "outcome": outcome, "stdout": "done"}

    return answer


async def test_a_workers_fault_is_tried_again_as_a_new_run(peer: Peer) -> None:
    peer.result = failing(2)
    tool = AsyncPythonTool(peer.url)
    assert await tool.python("p") == "done"
    assert len({seen.ids[0] for seen in peer.batches}) == 3
    peer.result = failing(3)
    with pytest.raises(ServiceFault, match="infra_error"):
        await tool.python("p")
    await tool.aclose()


async def test_no_service_is_our_fault(peer: Peer) -> None:
    peer.always = refuse(503)
    tool = AsyncPythonTool(peer.url, max_retries=0)
    with pytest.raises(ServiceFault, match="503"):
        await tool.python("p")
    calls = [{"id": "1", "function": {"name": "python", "arguments": {"code": "p"}}}]
    assert await answer_all(tool, [{"tool_calls": calls}, {"content": "none"}]) == [None, []]
    await tool.aclose()


@pytest.mark.parametrize("code", [None, 5, ["print(1)"], "\ud800"])
async def test_what_is_no_program_is_the_models_fault(peer: Peer, code: Any) -> None:
    tool = AsyncPythonTool(peer.url)
    assert (await tool.python(code)).startswith("[invalid call: code ")
    peer.always = refuse(413)
    assert (await tool.python("p")).startswith("[invalid call: 413")
    await tool.aclose()


async def test_openai_calls_are_answered_in_order_and_at_once(peer: Peer) -> None:
    def call(number: int, name: str, arguments: object) -> Json:
        return {"id": f"c{number}", "function": {"name": name, "arguments": arguments}}

    tool = AsyncPythonTool(peer.url)
    message = {
        "role": "assistant",
        "tool_calls": [
            call(0, "python", '{"code": "p0"}'),
            call(1, "browser", "{}"),
            call(2, "python", '{"code": '),
            call(3, "python", '["p"]'),
            call(4, "python", '{"source": "p"}'),
            call(5, "python", {"code": "p5"}),
        ],
    }
    answers = await answer_tool_calls(tool, message)
    assert [answer["tool_call_id"] for answer in answers] == [f"c{i}" for i in range(6)]
    texts = [answer["content"] for answer in answers]
    assert (texts[0], texts[5]) == ("p0", "p5")
    assert all(text.startswith("[invalid call: ") for text in texts[1:5])
    assert len(peer.batches) == 1
    objects = SimpleNamespace(
        tool_calls=[
            SimpleNamespace(
                id="o", function=SimpleNamespace(name="python", arguments='{"code": "p"}')
            )
        ]
    )
    [answer] = await answer_tool_calls(tool, objects)
    assert answer == {"role": "tool", "tool_call_id": "o", "name": "python", "content": "p"}
    await tool.aclose()


def test_tools_are_picklable_functions_with_settings(peer: Peer) -> None:
    with_settings: Any = {"job": "j", "echo_last": False, "max_chars": 4}
    copy = pickle.loads(pickle.dumps(PythonTool(peer.url, **with_settings).python))
    assert copy("abcdefgh").startswith("ab\n[...")
    copy.__self__.close()
    again = pickle.loads(pickle.dumps(AsyncPythonTool(peer.url).python))
    assert asyncio.run(again("q")) == "q"
    first, second = (seen.runs[0] for seen in peer.batches)
    assert (first["job"], "echo_last" in first) == ("j", True)
    assert (first["echo_last"], second["echo_last"]) == (False, True)


def test_environments_of_trl_share_one_client(peer: Peer) -> None:
    class Environment(PythonEnvironment):
        tool = PythonTool(peer.url)

    one, two = Environment(), Environment()
    one.reset(prompt="ignored")
    assert (one.python("a"), two.python("b")) == ("a", "b")
    assert Environment.tool is not None
    Environment.tool.close()
