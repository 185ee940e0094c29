"""smolagents: a ``Tool``. Its CodeAgent needs an executor that keeps state, which this is not."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false

from typing import Any, ClassVar

from smolagents import Tool

from rollyard.integrations.python_tool import DESCRIPTION, NAME, PythonTool


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
