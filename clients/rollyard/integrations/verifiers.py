"""verifiers (v1): a ``Toolset`` with the tool ``python``.

The gateway and its key come from ``ROLLYARD_URL`` and ``ROLLYARD_API_KEY``.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false

import verifiers.v1 as vf

from rollyard.integrations.observation import ServiceFault
from rollyard.integrations.python_tool import DESCRIPTION, AsyncPythonTool


class PythonToolset(vf.Toolset):
    """Serves the tool over MCP, as verifiers does with every toolset."""

    async def setup(self) -> None:
        """Make the tool; its connections are opened with the first call."""
        self._tool = AsyncPythonTool()

    @vf.tool
    async def python(self, code: str) -> str:
        try:
            return await self._tool.python(code)
        except ServiceFault as fault:
            # An MCP error: the harness sees that the call failed, and no output of a program.
            raise RuntimeError(f"service fault, not the program's: {fault.message}") from fault


PythonToolset.python.__doc__ = DESCRIPTION
