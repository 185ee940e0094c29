"""Tool calls in a model's text, as Hermes, Qwen and others write them: JSON between two tags."""

import json
import re
from typing import Any, cast

from rollyard.integrations.python_tool import NAME

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def find_calls(text: str) -> list[dict[str, Any]]:
    """The calls in one turn's text, in OpenAI's form; none: the turn is the last.

    One that is malformed is a call too, with arguments that are: the model is told what is wrong.
    """
    return [
        {"id": f"call-{number}", "type": "function", "function": _function(written)}
        for number, written in enumerate(_CALL.findall(text))
    ]


def _function(written: str) -> dict[str, Any]:
    try:
        call: object = json.loads(written)
    except ValueError:
        return {"name": NAME, "arguments": written}
    if not isinstance(call, dict):
        return {"name": NAME, "arguments": call}
    fields = cast("dict[str, object]", call)
    return {"name": fields.get("name", ""), "arguments": fields.get("arguments")}
