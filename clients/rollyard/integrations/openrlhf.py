"""OpenRLHF: an agent instance that runs the model's ``python`` blocks and feeds their output back.

In the file of ``--agent_func_path``::

    from openrlhf.utils.agent import MultiTurnAgentExecutor
    from rollyard.integrations.openrlhf import PythonAgent

    class Agent(PythonAgent):
        async def reward(self, action, states): …

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(Agent)
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false

import re
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase

from rollyard.integrations.python_tool import AsyncPythonTool

_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_shared: list[AsyncPythonTool] = []


class PythonAgent(AgentInstanceBase):
    """Runs the last ``python`` block of each turn; a turn without one is the last.

    ``feedback`` is the text around the output; override it for the model's chat format.
    The gateway and its key come from ``ROLLYARD_URL`` and ``ROLLYARD_API_KEY``.
    """

    max_turns = 8
    feedback = "\n```output\n{output}\n```\n"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not _shared:  # one for all prompts of this process: their calls travel together
            _shared.append(AsyncPythonTool())
        self._tool = _shared[0]
        self._turn = 0

    async def reward(self, action: str, states: dict[str, Any]) -> float:
        """The reward of a finished rollout, from its last turn. Override it."""
        raise NotImplementedError

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """One turn.

        Raises:
            ServiceFault: the service could not run the program.
        """
        import torch

        action = state_dict["action_text"]
        self._turn += 1
        blocks = _BLOCK.findall(action)
        done = not blocks or self._turn >= self.max_turns
        feedback = ""
        if not done:
            feedback = self.feedback.format(output=await self._tool.python(blocks[-1]))
        reward = await self.reward(action, state_dict) if done else 0.0
        return {
            "rewards": torch.tensor(reward),
            "scores": torch.tensor(reward),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": state_dict.get("sampling_params"),
            "extra_logs": {},
        }
