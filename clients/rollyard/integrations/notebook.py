"""A Python tool whose calls build on each other, by replay: each runs the earlier cells again.

There is no process that lives between two calls. A call's program is all cells so far, of which
only the last one prints. What follows from that:

- It costs what all cells cost: *n* calls run *n·(n+1)/2* cells, and one call's time limit covers
  them all. Right for a few cheap cells, wrong for one that trains a model.
- Files, variables and imports come back because they are made again. What differs from run to run
  differs here too: the clock, unseeded random numbers, the addresses in a default ``repr``.
- A cell that failed stays, with what it did before; one that a limit ended is left out.
- A copy costs nothing: :meth:`AsyncNotebook.fork` gives one for each branch of a search.
"""

import asyncio
import json
import re
import threading
from importlib import resources

from rollyard.integrations.python_tool import AsyncPythonTool, PythonTool
from rollyard.types import RunRequest, RunResult

PROGRAM = (
    resources.files(__package__ or "").joinpath("replay_program.py").read_text(encoding="utf-8")
)
ANSWER_FILE = "rollyard-answer.json"
_SCIENCE = re.compile(r"\b(?:numpy|scipy|sympy|pandas|networkx|mpmath)\b")
_KEPT = ("ok", "error")


class _Cells:
    """The cells so far, and requests made of them."""

    def __init__(self, cells: tuple[str, ...] = (), *, answer_call: str = "") -> None:
        self.cells = cells
        """Source text of what later calls replay."""
        self._answer_call = answer_call

    def _request(self, request: RunRequest, code: str) -> RunRequest:
        answer = ANSWER_FILE if self._answer_call else ""
        arguments = json.dumps([[*self.cells, code], self._answer_call, answer])
        update: dict[str, object] = {
            "code": f"{PROGRAM}\n\nreplay(*json.loads({arguments!r}))\n",
            "echo_last": False,
        }
        if _SCIENCE.search(arguments):
            update["template"] = "science"  # the worker does not look into texts
        if answer:
            update["fetch_files"] = [answer]
        return request.model_copy(update=update)

    def _keep(self, code: str, result: RunResult | None) -> None:
        if result is not None and result.outcome in _KEPT:
            self.cells = (*self.cells, code)

    def reset(self) -> None:
        """Forget all cells."""
        self.cells = ()


class AsyncNotebook(_Cells):
    """For asyncio: one for each rollout, all on one tool. Its calls run one after another."""

    def __init__(self, tool: AsyncPythonTool, cells: tuple[str, ...] = ()) -> None:
        super().__init__(cells)
        self._tool = tool
        self._turn = asyncio.Lock()

    async def python(self, code: str) -> str:
        """Run Python code that may use what earlier calls defined.

        Args:
            code: The code.

        Returns:
            What it printed and the value of a last expression, or a traceback.
        """
        text, _ = await self.run(code)
        return text

    async def run(self, code: str) -> tuple[str, RunResult | None]:
        """As :meth:`python`, with the result; None for a call that is no program.

        Raises:
            ServiceFault: after all retries; the cells are as before.
        """
        request = self._tool.request(code)
        if isinstance(request, str):
            return request, None
        async with self._turn:
            text, result = await self._tool.submit(self._request(request, code))
            self._keep(code, result)
        return text, result

    def fork(self) -> "AsyncNotebook":
        """A copy that goes its own way from here."""
        return AsyncNotebook(self._tool, self.cells)


class Notebook(_Cells):
    """The same for threads."""

    def __init__(
        self, tool: PythonTool, cells: tuple[str, ...] = (), *, answer_call: str = ""
    ) -> None:
        super().__init__(cells, answer_call=answer_call)
        self._tool = tool
        self._turn = threading.Lock()

    def python(self, code: str) -> str:
        """Run Python code that may use what earlier calls defined.

        Args:
            code: The code.

        Returns:
            What it printed and the value of a last expression, or a traceback.
        """
        text, _ = self.run(code)
        return text

    def run(self, code: str) -> tuple[str, RunResult | None]:
        """As :meth:`python`, with the result; None for a call that is no program.

        Raises:
            ServiceFault: after all retries; the cells are as before.
        """
        request = self._tool.request(code)
        if isinstance(request, str):
            return request, None
        with self._turn:
            text, result = self._tool.submit(self._request(request, code))
            self._keep(code, result)
        return text, result

    def fork(self) -> "Notebook":
        """A copy that goes its own way from here."""
        return Notebook(self._tool, self.cells, answer_call=self._answer_call)
