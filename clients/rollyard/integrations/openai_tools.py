"""OpenAI-style tool calls: the schema, and a helper that answers an assistant's message.

    tool = AsyncPythonTool()
    reply = await openai.chat.completions.create(messages=messages, tools=[SCHEMA], …)
    messages.append(reply.choices[0].message)
    messages += await answer_tool_calls(tool, reply.choices[0].message)

Messages and calls may be dicts or the objects of the ``openai`` package, which is not needed.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from rollyard.integrations.python_tool import NAME, SCHEMA, AsyncPythonTool

__all__ = ["SCHEMA", "answer_all", "answer_tool_calls"]


async def answer_tool_calls(tool: AsyncPythonTool, message: object) -> list[dict[str, Any]]:
    """Run all tool calls of one assistant message at once; tool messages in their order.

    A malformed call, or one to another tool, is answered with a text that says so.

    Raises:
        ServiceFault: the service could not run one of the programs.
    """
    calls = cast("Iterable[object]", _get(message, "tool_calls") or ())
    return list(await asyncio.gather(*(_answer(tool, call) for call in calls)))


async def answer_all(
    tool: AsyncPythonTool, messages: Iterable[object]
) -> list[list[dict[str, Any]] | None]:
    """Answer the messages of many samples at once, for a rollout loop over a batch.

    None stands for a sample whose calls the service could not run: mask it.
    """
    from rollyard.integrations.observation import ServiceFault

    async def one(message: object) -> list[dict[str, Any]] | None:
        try:
            return await answer_tool_calls(tool, message)
        except ServiceFault:
            return None

    return list(await asyncio.gather(*(one(message) for message in messages)))


async def _answer(tool: AsyncPythonTool, call: object) -> dict[str, Any]:
    function = _get(call, "function")
    name = str(_get(function, "name"))
    answer: dict[str, Any] = {"role": "tool", "tool_call_id": _get(call, "id"), "name": name}
    if name != NAME:
        return {**answer, "content": f"[invalid call: there is no tool {name!r}, only {NAME!r}]"}
    try:
        code = _code(_get(function, "arguments"))
    except ValueError as error:
        return {**answer, "content": f"[invalid call: {error}]"}
    return {**answer, "content": await tool.python(code)}


def _code(arguments: object) -> str:
    """The program in a call's arguments.

    Raises:
        ValueError: for the model to read.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments are not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise ValueError("the arguments are no object")
    code = cast("Mapping[str, object]", arguments).get("code")
    if not isinstance(code, str):
        raise ValueError('the arguments must have "code", a text')
    return code


def _get(item: object, name: str) -> object:
    if isinstance(item, Mapping):
        return cast("Mapping[str, object]", item).get(name)
    return getattr(item, name, None)
