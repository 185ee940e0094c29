"""verl: a ``BaseTool`` for its tool agent loop, and a function for ``@function_tool``.

As a tool class, in the file of ``multi_turn.tool_config_path``::

    tools:
      - class_name: rollyard.integrations.verl.RollyardTool
        config: {type: native, base_url: "http://gateway:8000", timeout_s: 10}

As a function, in the file of ``function_tool_path``::

    from rollyard.integrations.python_tool import AsyncPythonTool
    from verl.tools.function_tool import function_tool

    python = function_tool()(AsyncPythonTool("http://gateway:8000").python)

For rewards, verl needs nothing of this: point ``reward.sandbox_fusion.url`` at ``/run_code``.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from rollyard._config import DEFAULT_MAX_RETRIES
from rollyard.integrations.observation import DEFAULT_MAX_CHARS, ServiceFault
from rollyard.integrations.python_tool import SCHEMA, AsyncPythonTool
from rollyard.types import Limits


class RollyardTool(BaseTool):
    """Runs each call in a jail of its own; all rollouts of a process share its connections.

    Keys of ``config``: ``base_url``, ``api_key``, ``job``, ``timeout_s``, ``max_chars``,
    ``max_retries``, and ``on_fault``: what happens when the service could not run a program,
    after all retries. ``raise`` (default) lets ServiceFault pass verl's loop, which shows other
    exceptions to the model. ``mark`` goes on with an empty observation, sets the trajectory's
    ``extra_fields["service_fault"]`` and the metric ``service_fault``: mask what has it.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._mark = config.get("on_fault", "raise") == "mark"
        self._tool = AsyncPythonTool(
            config.get("base_url"),
            api_key=config.get("api_key"),
            job=config.get("job", "default"),
            limits=Limits(timeout_s=config.get("timeout_s", 10.0)),
            max_chars=config.get("max_chars", DEFAULT_MAX_CHARS),
            max_retries=config.get("max_retries", DEFAULT_MAX_RETRIES),
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        """Run ``parameters["code"]``.

        Raises:
            ServiceFault: unless ``on_fault`` is ``mark``.
        """
        try:
            text, result = await self._tool.run(parameters.get("code"))  # pyright: ignore[reportArgumentType]
        except ServiceFault as fault:
            return self._faulted(fault, kwargs)
        metrics: dict[str, Any] = {"service_fault": 0}
        if result is not None:
            metrics |= {"outcome": result.outcome, "wall_ms": result.wall_ms}
        return ToolResponse(text=text), 0.0, metrics

    def _faulted(
        self, fault: ServiceFault, kwargs: dict[str, Any]
    ) -> tuple[Any, float, dict[str, Any]]:
        """Mark the trajectory, or raise, as ``on_fault`` says."""
        if not self._mark:
            raise fault
        fields = getattr(kwargs.get("agent_data"), "extra_fields", None)
        if isinstance(fields, dict):
            fields["service_fault"] = True
        return ToolResponse(text=""), 0.0, {"service_fault": 1}
