"""tinker-cookbook: a ``Tool``. For its ``SANDBOX_URL``, point that at ``/run_code`` instead."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from typing import Any

from tinker_cookbook.tool_use.types import ToolInput, ToolResult

from rollyard.integrations.python_tool import DESCRIPTION, NAME, SCHEMA, AsyncPythonTool


class RollyardTool:
    """Satisfies ``tinker_cookbook.tool_use.types.Tool``; made from an :class:`AsyncPythonTool`."""

    name = NAME
    description = DESCRIPTION
    parameters_schema: dict[str, Any] = SCHEMA["function"]["parameters"]

    def __init__(self, tool: AsyncPythonTool | None = None) -> None:
        self._tool = tool or AsyncPythonTool()

    async def run(self, input: ToolInput) -> ToolResult:
        """Run ``input.arguments["code"]``.

        Raises:
            ServiceFault: the service could not run it.
        """
        text, result = await self._tool.run(input.arguments.get("code", ""))
        message: dict[str, Any] = {"role": "tool", "content": text, "name": self.name}
        if input.call_id is not None:
            message["tool_call_id"] = input.call_id
        metrics = {} if result is None else {"wall_ms": result.wall_ms}
        return ToolResult(messages=[message], metrics=metrics)

    def to_spec(self) -> dict[str, Any]:
        """What renderers show to the model."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters_schema,
        }
