"""rStar2-Agent: its two tools for verl, on the SDK instead of its code-judge client.

Pointing ``host_addr`` and ``host_port`` at the gateway needs none of this; that way each batch
waits half a second more, in the client itself. In the file of ``multi_turn.tool_config_path``::

    tools:
      - class_name: rollyard.integrations.rstar2.SimJupyterTool
        config: {type: native, base_url: "http://gateway:8000"}
        tool_schema: …   # rStar2's own, of jupyter_code
      - class_name: rollyard.integrations.rstar2.PythonTool
        config: {type: native, base_url: "http://gateway:8000"}
        tool_schema: …   # rStar2's own, of python_code_with_standard_io
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import json
from typing import Any

from verl.tools.schemas import ToolResponse

from rollyard.integrations.notebook import AsyncNotebook
from rollyard.integrations.observation import ServiceFault
from rollyard.integrations.verl import RollyardTool
from rollyard.types import RunResult

KEPT_CHARS = 1000
"""Of each stream, as code-judge keeps."""


class SimJupyterTool(RollyardTool):
    """``jupyter_code``: each call replays the rollout's earlier cells, as rStar2's own does.

    Its loop hands them to create() as ``history_tool_calls``. Config as of ``verl.RollyardTool``.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._notebooks: dict[str, AsyncNotebook] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        """Begin with the cells of ``history_tool_calls``; a malformed one is left out."""
        created: tuple[str, Any] = await super().create(instance_id)
        cells = [_code(call) for call in kwargs.get("history_tool_calls", ())]
        history = tuple(code for code in cells if code is not None)
        self._notebooks[created[0]] = AsyncNotebook(self._tool, history)
        return created

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        """Run ``parameters["code"]`` after the cells so far.

        Raises:
            ServiceFault: unless ``on_fault`` is ``mark``.
        """
        notebook = self._notebooks[instance_id]
        try:
            _, result = await notebook.run(parameters.get("code", ""))
        except ServiceFault as fault:
            return self._faulted(fault, kwargs)
        return _response(result)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the cells."""
        self._notebooks.pop(instance_id, None)


class PythonTool(RollyardTool):
    """``python_code_with_standard_io``: one program with its standard input."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        """Run ``parameters["code"]`` on ``parameters["input"]``.

        Raises:
            ServiceFault: unless ``on_fault`` is ``mark``.
        """
        request = self._tool.request(parameters.get("code", ""))
        if isinstance(request, str):
            return ToolResponse(text=request), 0.0, {}
        request = request.model_copy(update={"stdin": str(parameters.get("input") or "")})
        try:
            _, result = await self._tool.submit(request)
        except ServiceFault as fault:
            return self._faulted(fault, kwargs)
        return _response(result)


def _code(call: Any) -> str | None:
    """The code of an earlier call (a verl FunctionCall), or None."""
    if call.name != "jupyter_code":
        return None
    try:
        code = json.loads(call.arguments)["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None


def _response(result: RunResult | None) -> tuple[Any, float, dict[str, Any]]:
    """What rStar2's prompt teaches the model to expect of a call."""
    if result is None:
        return ToolResponse(text="Tool call failure\nreason: invalid_input"), 0.0, {}
    lines = ["Tool call success" if result.ok else "Tool call failure"]
    if not result.ok:
        late = result.outcome in ("timeout", "cpu_timeout")
        lines.append(f"reason: {'worker_timeout' if late else ''}")
    lines += [f"stdout: {result.stdout[:KEPT_CHARS]}"] if result.stdout else []
    lines += [f"stderr: {result.stderr[:KEPT_CHARS]}"] if result.stderr else []
    lines.append(f"execution time: {result.wall_ms / 1e3:.2f}s")
    metrics = {"service_fault": 0, "outcome": result.outcome, "wall_ms": result.wall_ms}
    return ToolResponse(text="\n".join(lines)), 0.0, metrics
