"""TRL: tools and an environment for ``GRPOTrainer``.

    GRPOTrainer(…, tools=[PythonTool("http://gateway:8000").python])
    GRPOTrainer(…, environment_factory=PythonEnvironment)

Use the synchronous tool: TRL's loop takes the exceptions of asynchronous ones, ServiceFault too,
for their results. That loop also goes through the samples one after another; with
:class:`rollyard.integrations.trl_rollout.ToolRollout` all samples' calls of a turn run at once.
"""

from rollyard.integrations.python_tool import PythonTool

__all__ = ["PythonEnvironment", "PythonTool"]


class PythonEnvironment:
    """One rollout's environment, with one tool; all instances of a process share connections.

    The gateway and its key come from ``ROLLYARD_URL`` and ``ROLLYARD_API_KEY``; for other settings
    give ``environment_factory`` a subclass that sets ``tool``.
    """

    tool: PythonTool | None = None

    def reset(self, **_: object) -> None:
        """Begin a new rollout; there is no state to clear."""

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints, and the value of a last expression.

        Each call starts a new interpreter without network; numpy, scipy, sympy, pandas and
        networkx are there.

        Args:
            code: The program.

        Returns:
            What it printed, with a traceback or the limit that ended it.
        """
        if type(self).tool is None:
            type(self).tool = PythonTool()
        assert self.tool is not None
        return self.tool.python(code)
