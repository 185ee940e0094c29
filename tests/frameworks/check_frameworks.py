"""Each integration against its framework's own classes and a real service."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false

import asyncio
import types
from typing import Any

import pytest

from rollyard.integrations.observation import ServiceFault
from rollyard.integrations.python_tool import SCHEMA, AsyncPythonTool, PythonTool

from .conftest import load_past_init

NOWHERE = "http://127.0.0.1:9"


def test_schema_is_what_transformers_makes_of_the_functions() -> None:
    from transformers.utils import get_json_schema

    for function in (PythonTool().python, AsyncPythonTool().python):
        made = get_json_schema(function)["function"]
        assert made["name"] == SCHEMA["function"]["name"]
        assert made["parameters"] == SCHEMA["function"]["parameters"]
        assert made["description"].startswith("Run a Python program and return what it prints")


def test_verl_base_tool(url: str) -> None:
    load_past_init("verl", "verl.utils", "verl.tools")
    from verl.tools.base_tool import BaseTool

    from rollyard.integrations.verl import RollyardTool

    async def scenario() -> None:
        tool = RollyardTool(config={"type": "native", "timeout_s": 1}, tool_schema=None)
        assert isinstance(tool, BaseTool)
        assert tool.name == "python"
        assert tool.get_openai_tool_schema().function.parameters.required == ["code"]
        instance, _ = await tool.create()
        response, reward, metrics = await tool.execute(instance, {"code": "6 * 7"})
        assert (response.text, reward, metrics["outcome"]) == ("42", 0.0, "ok")
        response, _, metrics = await tool.execute(instance, {"code": "while True: pass"})
        assert (metrics["outcome"], metrics["service_fault"]) == ("timeout", 0)
        response, _, _ = await tool.execute(instance, {})
        assert "invalid call" in response.text
        await tool.release(instance)

    asyncio.run(scenario())


def test_verl_fault_raises_or_marks() -> None:
    load_past_init("verl", "verl.utils", "verl.tools")
    from rollyard.integrations.verl import RollyardTool

    config = {"base_url": NOWHERE, "max_retries": 0}

    async def scenario() -> None:
        agent_data = types.SimpleNamespace(extra_fields={})
        marks = RollyardTool({**config, "on_fault": "mark"})
        response, _, metrics = await marks.execute("i", {"code": "1"}, agent_data=agent_data)
        assert (response.text, metrics) == ("", {"service_fault": 1})
        assert agent_data.extra_fields == {"service_fault": True}
        with pytest.raises(ServiceFault):
            await RollyardTool(config).execute("i", {"code": "1"})

    asyncio.run(scenario())


def test_verl_function_tool(url: str) -> None:
    load_past_init("verl", "verl.utils", "verl.tools")
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool

    async def scenario() -> Any:
        function_tool()(AsyncPythonTool().python)
        tool = FUNCTION_TOOL_REGISTRY["python"]
        assert tool.is_async
        return await tool.call({"code": "print(3)"})

    assert asyncio.run(scenario()) == "3"


def test_verl_reward(http_url: str) -> None:
    """verl's own client and judgement of /run_code: pass, wrong, error, time-out, compiler."""
    load_past_init("verl", "verl.utils", "verl.utils.reward_score")
    from verl.utils.reward_score.sandbox_fusion import compute_score
    from verl.utils.reward_score.sandbox_fusion.utils import check_correctness

    url = f"{http_url}/run_code"
    cases = {
        "inputs": [f"{i}\n" for i in range(200)],
        "outputs": [f"{i * i}\n" for i in range(200)],
    }
    code = "```python\nn = int(input())\nprint(n * n if n % 4 else -1)\n```"
    score, about = compute_score(url, None, 512, code, cases, continuous=False)
    assert (score, len(about)) == (0.75, 200)
    for solution, language, verdict in (
        ("print(input())", "python", True),
        ("print('other')", "python", False),
        ("1 / 0", "python", -2),
        ("while True: pass", "python", -3),
        ("int main() {", "cpp", -4),
    ):
        one = {"inputs": ["x"], "outputs": ["x"]}
        results, _ = check_correctness(url, one, solution, timeout=1, language=language)
        assert results == [verdict], solution
    function = {"inputs": ["2\n3"], "outputs": ["5"], "fn_name": "add"}
    results, _ = check_correctness(url, function, "def add(a, b):\n    return a + b")
    assert results == [True]


def test_skyrl_tool_group(url: str) -> None:
    load_past_init("skyrl_gym", "skyrl_gym.tools")
    from rollyard.integrations.skyrl import PythonToolGroup

    group = PythonToolGroup()
    assert group.get_tool_names() == ["python"]
    assert group.execute_tool("python", "2 ** 5") == "32"


def test_openrlhf_agent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    # torch.tensor is all that is used of torch, which is not installed here.
    fake = types.SimpleNamespace(tensor=lambda value: ("tensor", value))
    monkeypatch.setitem(sys.modules, "torch", fake)  # pyright: ignore[reportArgumentType]
    load_past_init("openrlhf", "openrlhf.utils")
    from openrlhf.utils.agent import MultiTurnAgentExecutor

    from rollyard.integrations.openrlhf import PythonAgent

    class Agent(PythonAgent):
        async def reward(self, action: str, states: dict[str, Any]) -> float:
            return float(states["label"] in action)

    MultiTurnAgentExecutor(Agent)

    async def scenario() -> list[dict[str, Any]]:
        agent = Agent()
        state = await agent.reset({"observation": "question", "label": "42"})
        first = {**state, "action_text": "Let me see.\n```python\n6 * 7\n```\n"}
        second = {**state, "action_text": "It is 42."}
        return [await agent.step(first), await agent.step(second)]

    first, second = asyncio.run(scenario())
    assert (first["done"], first["environment_feedback"]) == (False, "\n```output\n42\n```\n")
    assert (second["done"], second["rewards"]) == (True, ("tensor", 1.0))


def test_tinker_tool(url: str) -> None:
    import sys

    # Its renderers need torch; of them the protocol's module takes two type names.
    load_past_init("tinker_cookbook", "tinker_cookbook.tool_use", "tinker_cookbook.renderers")
    names = types.ModuleType("tinker_cookbook.renderers.base")
    names.Message = names.ToolSpec = dict  # type: ignore[attr-defined]
    sys.modules[names.__name__] = names
    from tinker_cookbook.tool_use.types import Tool, ToolInput

    from rollyard.integrations.tinker import RollyardTool

    tool = RollyardTool()
    assert isinstance(tool, Tool)
    result = asyncio.run(tool.run(ToolInput(arguments={"code": "print(1)"}, call_id="c")))
    assert result.messages == [
        {"role": "tool", "content": "1", "name": "python", "tool_call_id": "c"}
    ]
    assert not result.should_stop


def test_langchain_tool(url: str) -> None:
    from rollyard.integrations.langchain import python_tool

    tool = python_tool()
    assert tool.invoke({"code": "print(5)"}) == "5"
    assert asyncio.run(tool.ainvoke({"code": "1/0"})).endswith("division by zero")
    call = {"type": "tool_call", "id": "c", "name": "python", "args": {"code": "2"}}
    message = tool.invoke(call)
    assert (message.content, message.tool_call_id) == ("2", "c")
    down = python_tool(NOWHERE, max_retries=0)
    down.handle_tool_error = True
    with pytest.raises(ServiceFault):
        down.invoke({"code": "1"})


def test_trl_finds_the_environments_tool(url: str) -> None:
    """As GRPOTrainer looks for tools: the functions of the class, but reset and private ones."""
    import inspect

    from transformers.utils import get_json_schema

    from rollyard.integrations.trl import PythonEnvironment

    environment = PythonEnvironment()
    members = dict(inspect.getmembers(type(environment), predicate=inspect.isfunction))
    assert sorted(members) == ["python", "reset"]
    assert environment.reset(prompt=[]) is None
    assert not inspect.iscoroutinefunction(environment.python)
    assert get_json_schema(environment.python)["function"]["name"] == "python"
    assert environment.python(code="1 + 1") == "2"


def test_openai_package_messages(url: str) -> None:
    from openai.types.chat import ChatCompletionMessage

    from rollyard.integrations.openai_tools import answer_tool_calls

    message = ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function",
                 "function": {"name": "python", "arguments": '{"code": "print(7)"}'}},
            ],
        }
    )  # fmt: skip
    [answer] = asyncio.run(answer_tool_calls(AsyncPythonTool(), message))
    assert (answer["role"], answer["tool_call_id"], answer["content"]) == ("tool", "a", "7")


def test_smolagents_tool(url: str) -> None:
    from smolagents import Tool

    from rollyard.integrations.smolagents import RollyardPythonTool

    tool = RollyardPythonTool()
    assert isinstance(tool, Tool)
    assert tool(code="print(8)") == "8"
    assert "code" in tool.to_code_prompt()


def test_smolagents_code_agent(url: str) -> None:
    """A whole agent; only its model is scripted."""
    from smolagents import ChatMessage, CodeAgent, MessageRole, Model

    from rollyard.integrations.smolagents import RollyardExecutor

    class Scripted(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []
            self.says = iter(
                [
                    "x = [n ** 2 for n in range(4)]\nprint(x)",
                    "x[9]",
                    "final_answer({'sum': sum(x)})",
                ]
            )

        def generate(self, messages: Any, **_: Any) -> ChatMessage:
            self.seen.append(str(messages[-1].content))
            text = f"Thought: so.\n<code>\n{next(self.says)}\n</code>"
            return ChatMessage(role=MessageRole.ASSISTANT, content=text)

    model = Scripted()
    executor = RollyardExecutor()
    agent = CodeAgent(tools=[], model=model, executor=executor, verbosity_level=0)
    assert agent.run("square") == {"sum": 14}
    assert "[0, 1, 4, 9]" in model.seen[1]
    assert "IndexError: list index out of range" in model.seen[2]
    agent.python_executor.send_variables({"given": {"a": [1]}})
    assert executor("given['a']").output == [1]
    with pytest.raises(ValueError, match="cannot call search"):
        executor.send_tools({"search": None, "final_answer": None})
    down = RollyardExecutor(NOWHERE, max_retries=0)
    with pytest.raises(ServiceFault):
        down("1")
    executor.cleanup()


def test_rstar2_tools(url: str) -> None:
    load_past_init("verl", "verl.utils", "verl.tools")
    from verl.tools.base_tool import BaseTool

    from rollyard.integrations.rstar2 import PythonTool as StandardIo
    from rollyard.integrations.rstar2 import SimJupyterTool

    def called(name: str, arguments: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(name=name, arguments=arguments)

    history = [
        called("jupyter_code", '{"code": "x = 20\\nprint(\'loud\')"}'),
        called("jupyter_code", "{broken"),
        called("other", '{"code": "x = 0"}'),
    ]

    async def scenario() -> None:
        cells = SimJupyterTool({"type": "native"})
        assert isinstance(cells, BaseTool)
        instance, _ = await cells.create(history_tool_calls=history)
        response, _, metrics = await cells.execute(instance, {"code": "x += 1\n2 * x"})
        assert response.text.startswith("Tool call success\nstdout: 42\n\nexecution time: 0.")
        assert metrics["service_fault"] == 0
        response, _, _ = await cells.execute(instance, {"code": "x / 0"})
        assert response.text.startswith("Tool call failure\nreason: \nstderr: Traceback")
        await cells.release(instance)
        program = StandardIo({"type": "native"})
        instance, _ = await program.create()
        given = {"code": "print(input() * 2)", "input": "ab"}
        response, _, _ = await program.execute(instance, given)
        assert "stdout: abab" in response.text
        await program.release(instance)

    asyncio.run(scenario())


def test_verifiers_toolset(url: str) -> None:
    from mcp import Client
    from mcp.server.mcpserver import MCPServer
    from verifiers.v1.mcp.toolset import ToolsetConfig

    from rollyard.integrations.verifiers import PythonToolset

    async def scenario() -> tuple[str, str | None, str]:
        toolset = PythonToolset(ToolsetConfig())
        await toolset.setup()
        server = MCPServer("toolset")
        toolset.register(server)
        async with Client(server) as client:
            [tool] = (await client.list_tools()).tools
            result = await client.call_tool("python", {"code": "print(9)"})
            return tool.name, tool.description, result.content[0].text  # type: ignore[union-attr]

    name, description, text = asyncio.run(scenario())
    assert (name, text) == ("python", "9")
    assert description is not None
    assert description.startswith("Run a Python program")


def test_llamaindex_takes_the_functions(url: str) -> None:
    from llama_index.core.tools import FunctionTool

    tool = FunctionTool.from_defaults(fn=PythonTool().python, async_fn=AsyncPythonTool().python)
    assert tool.metadata.name == "python"
    assert tool.metadata.get_parameters_dict()["required"] == ["code"]
    assert tool.call(code="1 + 1").content == "2"
    assert asyncio.run(tool.acall(code="print(2)")).content == "2"


def test_e2b_reads_our_events(url: str) -> None:
    import httpx2
    from e2b_code_interpreter.models import Execution, parse_output

    transport = httpx2.HTTPTransport(uds=url.removeprefix("unix://"))
    with httpx2.Client(transport=transport, base_url="http://service") as http:

        def execute(code: str) -> Execution:
            execution = Execution()
            for line in http.post("/execute", json={"code": code}).text.splitlines():
                parse_output(execution, line)
            return execution

        good = execute("print('a')\n2 + 3")
        assert (good.text, good.logs.stdout, good.error) == ("5", ["a\n"], None)
        bad = execute("1 / 0")
        assert bad.error is not None
        assert (bad.error.name, bad.error.value) == ("ZeroDivisionError", "division by zero")
