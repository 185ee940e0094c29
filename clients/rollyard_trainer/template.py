r"""The paper's prompt (figure 3) in Qwen's chat markup, prefix-preserving by construction.

A conversation only ever grows: prompt, then for each turn what the policy wrote, then
:func:`tool_turn`. Nothing already sent is rendered again, so token ids never drift.
The figure opens the answer with ``<think>``, the text and the released code with ``<reason>``;
this is ``<reason>``. Line ends, which the figure does not show, are Qwen's.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from rollyard_trainer.parse import TOOL_NAME

START, END = "<|im_start|>", "<|im_end|>"
OPENING = "\n<|im_start|>assistant\n<reason>"

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Execute Python code with standard input and capture standard output. This "
        "function takes a Python code string and an input string, provides the input string "
        "through standard input (stdin) to the code, and captures and returns any output produced "
        "through standard output (stdout). If the executed code raises an exception, the error "
        "message will be captured and returned instead.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {
                    "type": "string",
                    "description": "A string containing Python code to be executed. The code can "
                    "read from standard input using the input() function.",
                },
                "input": {
                    "type": "string",
                    "description": "A string that will be provided as standard input to the code "
                    "when it calls input().",
                },
            },
            "required": ["code", "input"],
        },
        "return": {
            "type": "string",
            "description": "str: The output produced by the executed code through standard output. "
            "If an error occurs during execution, the error message will be returned.",
        },
    },
}

SYSTEM_PLAIN = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant "
    "solves it. The Assistant first thinks about the reasoning process in the mind and then "
    "provides the user with the answer. The reasoning process and answer are enclosed within "
    "<reason> </reason> and <answer> </answer> tags, respectively, i.e., <reason> reasoning "
    "process here </reason><answer> answer here </answer>."
)
SYSTEM = (
    f"{SYSTEM_PLAIN}\n\n# Tools\n\n"
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    f"{json.dumps(TOOL)}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call>"
)
ASK = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here "
    "</answer>. And your final answer will be extracted automatically by the \\boxed{} tag.\n"
    "This is the problem:\n"
)
OBSERVATION = "{observation}"  # in a demonstration, stands for what the call before returned
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>\n", "\n</tool_response>"


def prompt(question: str, *, tools: bool = True) -> str:
    """Everything before the policy's first token; without ``tools``, the system prompt has none."""
    system = SYSTEM if tools else SYSTEM_PLAIN
    return f"<|im_start|>system\n{system}{END}\n<|im_start|>user\n{ASK}{question}{END}{OPENING}"


def messages(question: str, *, tools: bool = True) -> list[dict[str, str]]:
    """The same for chat interfaces, whose servers add their model's own markup."""
    return [
        {"role": "system", "content": SYSTEM if tools else SYSTEM_PLAIN},
        {"role": "user", "content": ASK + question},
    ]


def tool_turn(observations: Sequence[str]) -> str:
    """What follows a turn that ended with ``END``: the answers to its calls and the next header."""
    return f"\n<|im_start|>user\n{tool_message(observations)}{END}{OPENING}"


def tool_message(observations: Sequence[str]) -> str:
    """The answers to a turn's calls."""
    return "\n".join(f"{RESPONSE_OPEN}{quoted(text)}{RESPONSE_CLOSE}" for text in observations)


def quoted(observation: str) -> str:
    """The observation, unable to end its block or to start a turn: programs print anything."""
    return observation.replace("<|", "< |").replace("</tool_response>", "< /tool_response>")


def digest() -> str:
    """Short hash of the template; results under different ones are not comparable."""
    return hashlib.sha256((prompt("\0") + tool_turn(["\0", "\0"])).encode()).hexdigest()[:12]
