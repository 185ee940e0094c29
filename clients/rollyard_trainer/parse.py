"""Hermes tool calls: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (paper §2.1)."""

import json
import re
from dataclasses import dataclass
from typing import Any, cast

TOOL_NAME = "execute_python_code_with_standard_io"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A program to run, or why there is none: ``error`` is then what the policy is told."""

    code: str = ""
    stdin: str = ""
    error: str = ""


def calls(turn: str) -> list[Call]:
    """All tool calls of one assistant turn, in order; without any, the rollout ends.

    A block that is not closed, no JSON, or not a call of the tool is a call with an ``error``.
    """
    return [
        _call(match[1], closed=match[0].endswith("</tool_call>")) for match in _CALL.finditer(turn)
    ]


def _call(block: str, *, closed: bool) -> Call:
    if not closed:
        return Call(error="Failed to parse tool call: <tool_call> is not closed")
    try:
        value: Any = json.loads(block, strict=False)  # models write line ends into strings
    except (json.JSONDecodeError, RecursionError) as error:
        return Call(error=f"Failed to parse tool call: {error}")
    if not isinstance(value, dict):
        return Call(error="Failed to parse tool call: it must be a JSON object")
    call = cast("dict[str, Any]", value)
    if call.get("name") != TOOL_NAME:
        return Call(error=f"Failed to parse tool call: no tool is named {call.get('name')!r}")
    arguments: Any = call.get("arguments")
    if not isinstance(arguments, dict):
        return Call(error='Failed to parse tool call: "arguments" must be an object')
    given = cast("dict[str, Any]", arguments)
    code: Any = given.get("code")
    stdin: Any = given.get("input", "")
    if not isinstance(code, str) or not isinstance(stdin, str):
        return Call(error='Failed to parse tool call: "code" and "input" must be strings')
    return Call(code=code, stdin=stdin)
