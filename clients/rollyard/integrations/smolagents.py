"""smolagents: a ``Tool`` for a ToolCallingAgent, and an executor for a CodeAgent.

    CodeAgent(tools=[], model=model, executor=RollyardExecutor("http://gateway:8000"))

The executor keeps state by replay: see :mod:`rollyard.integrations.notebook` for what that costs.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from smolagents import Tool
from smolagents.local_python_executor import CodeOutput, InterpreterError, PythonExecutor

from rollyard.integrations.notebook import ANSWER_FILE, Notebook
from rollyard.integrations.python_tool import DESCRIPTION, NAME, PythonTool

FINAL_ANSWER = "final_answer"


class RollyardPythonTool(Tool):
    """The tool ``python`` for a ToolCallingAgent.

    Args:
        base_url: The gateway; default as :class:`rollyard.Client`.
        options: As of :class:`rollyard.integrations.python_tool.PythonTool`.
    """

    name = NAME
    description = DESCRIPTION
    inputs: ClassVar[dict[str, Any]] = {"code": {"type": "string", "description": "The program."}}
    output_type = "string"

    def __init__(self, base_url: str | None = None, **options: Any) -> None:
        super().__init__()
        self._tool = PythonTool(base_url, **options)

    def forward(self, code: str) -> str:
        """Run a program; what it printed.

        Raises:
            ServiceFault: the service could not run it.
        """
        return self._tool.python(code)


class RollyardExecutor(PythonExecutor):
    """Runs a CodeAgent's code in jails; each step may use what earlier ones defined.

    ``final_answer`` is the one tool that code can call: others would have to leave the jail.
    An answer comes back as JSON where it can, else as its ``repr``; nothing is unpickled.

    Args:
        base_url: The gateway; default as :class:`rollyard.Client`.
        options: As of :class:`rollyard.integrations.python_tool.PythonTool`.
    """

    def __init__(self, base_url: str | None = None, **options: Any) -> None:
        self._tool = PythonTool(base_url, **options)
        self._notebook = Notebook(self._tool, answer_call=FINAL_ANSWER)

    def send_tools(self, tools: Mapping[str, Any]) -> None:
        """Take the agent's tools.

        Raises:
            ValueError: there is one besides ``final_answer``.
        """
        if others := sorted(set(tools) - {FINAL_ANSWER}):
            raise ValueError(
                f"code in a jail cannot call {', '.join(others)}: give such tools to a"
                " ToolCallingAgent, beside RollyardPythonTool"
            )

    def send_variables(self, variables: Mapping[str, Any]) -> None:
        """Define variables for all later code.

        Raises:
            TypeError: one is no JSON.
        """
        if variables:
            text = json.dumps(dict(variables))
            self._run(f"import json as _json\nglobals().update(_json.loads({text!r}))\ndel _json")

    def __call__(self, code_action: str) -> CodeOutput:
        """Run one step.

        Raises:
            InterpreterError: the code failed, or a limit ended it; for the agent to read.
            ServiceFault: the service could not run it.
        """
        return self._run(code_action)

    def _run(self, code: str) -> CodeOutput:
        text, result = self._notebook.run(code)
        if result is None or not result.ok:
            raise InterpreterError(text)
        logs = result.stdout + result.stderr
        answer: dict[str, Any] = {"final": False, "value": None}
        if ANSWER_FILE in result.files:  # a program that forges it could as well have called it
            answer |= json.loads(result.file_bytes(ANSWER_FILE))
        return CodeOutput(answer["value"], logs, bool(answer["final"]))

    def cleanup(self) -> None:
        """Forget the state, and close all connections."""
        self._notebook.reset()
        self._tool.close()
