"""LangChain: the tool as a ``StructuredTool``, synchronous and asynchronous."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false

from typing import Any

from langchain_core.tools import StructuredTool

from rollyard.integrations.python_tool import DESCRIPTION, NAME, AsyncPythonTool, PythonTool


def python_tool(base_url: str | None = None, **options: Any) -> StructuredTool:
    """The tool ``python``; arguments as of :class:`rollyard.integrations.python_tool.PythonTool`.

    ServiceFault passes through agents, which show other exceptions of tools to the model.
    """
    return StructuredTool.from_function(
        func=PythonTool(base_url, **options).python,
        coroutine=AsyncPythonTool(base_url, **options).python,
        name=NAME,
        description=DESCRIPTION,
    )
