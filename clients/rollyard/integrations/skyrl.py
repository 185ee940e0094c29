"""SkyRL-Gym: a ``ToolGroup`` with the tool ``python``, in place of its unjailed one."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false

from typing import Any

from skyrl_gym.tools.core import ToolGroup, tool

from rollyard.integrations.python_tool import PythonTool


class PythonToolGroup(ToolGroup):
    """Synchronous, as SkyRL-Gym's tools are; its environments run in threads.

    Args:
        base_url: The gateway; default as :class:`rollyard.Client`.
        options: As of :class:`rollyard.integrations.python_tool.PythonTool`.
    """

    def __init__(self, base_url: str | None = None, **options: Any) -> None:
        self._tool = PythonTool(base_url, **options)
        super().__init__(name="PythonToolGroup")

    @tool
    def python(self, code: str) -> str:
        """Run a program; what it printed.

        Raises:
            ServiceFault: the service could not run it.
        """
        return self._tool.python(code)
