"""A Python interpreter as a tool: the function that every other module here hands to a framework.

``AsyncPythonTool().python`` and ``PythonTool().python`` are callables with type hints and a
Google docstring, which is what frameworks make tool schemas of. They are picklable.
"""

from typing import Any

from rollyard._async_client import AsyncClient
from rollyard._client import Client
from rollyard._config import DEFAULT_MAX_RETRIES
from rollyard.errors import PayloadTooLarge, RollyardError
from rollyard.integrations.observation import DEFAULT_MAX_CHARS, ServiceFault, observation
from rollyard.types import Limits, RunRequest, RunResult

NAME = "python"
DESCRIPTION = (
    "Run a Python program and return what it prints, and the value of a last expression. "
    "Each call starts a new interpreter without network; numpy, scipy, sympy, pandas and networkx "
    "are there."
)
FAULT_RETRIES = 2

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": DESCRIPTION,
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}
"""The tool in OpenAI's format."""


class _Tool:
    """What both tools share.

    Args:
        base_url: The gateway; default as :class:`rollyard.AsyncClient`.
        api_key: Bearer key; default as there.
        job: The training job that runs are accounted to.
        limits: What a program may use; default: 10 s and the service's own.
        max_chars: Longest observation, in characters.
        echo_last: Show the value of a last expression, as a notebook does.
        fault_retries: Times that a run is tried again which a worker's fault ended.
        max_retries: Times that a request is tried again; as :class:`rollyard.AsyncClient`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        job: str = "default",
        limits: Limits | None = None,
        max_chars: int = DEFAULT_MAX_CHARS,
        echo_last: bool = True,
        fault_retries: int = FAULT_RETRIES,
        max_retries: int | None = DEFAULT_MAX_RETRIES,
    ) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._job = job
        self._max_retries = max_retries
        self._limits = limits or Limits()
        self._max_chars = max_chars
        self._echo_last = echo_last
        self._fault_retries = fault_retries

    def request(self, code: str) -> RunRequest | str:
        """The run, or what to tell a model whose argument is no program."""
        if not isinstance(code, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            return f"[invalid call: code must be text, not {type(code).__name__}]"
        try:
            code.encode()
        except UnicodeEncodeError as error:
            return f"[invalid call: code is not valid Unicode text: {error}]"
        return RunRequest(code=code, limits=self._limits, echo_last=self._echo_last, job=self._job)

    def _read(self, result: RunResult) -> str:
        return observation(result, max_chars=self._max_chars)


class PythonTool(_Tool):
    """The tool for synchronous frameworks. Safe to share between threads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._client = Client(
            self._base_url, api_key=self._api_key, job=self._job, max_retries=self._max_retries
        )

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints, and the value of a last expression.

        Each call starts a new interpreter without network; numpy, scipy, sympy, pandas and
        networkx are there.

        Args:
            code: The program.

        Returns:
            What it printed, with a traceback or the limit that ended it.
        """
        text, _ = self.run(code)
        return text

    def run(self, code: str) -> tuple[str, RunResult | None]:
        """As :meth:`python`, with the result; None for a call that is no program.

        Raises:
            ServiceFault: after all retries.
        """
        request = self.request(code)
        return (request, None) if isinstance(request, str) else self.submit(request)

    def submit(self, request: RunRequest) -> tuple[str, RunResult | None]:
        """As :meth:`run`, for a request made from one of :meth:`request`."""
        for left in range(self._fault_retries, -1, -1):
            try:
                result = self._client.submit(request)
            except PayloadTooLarge as error:
                return f"[invalid call: {error}]", None
            except RollyardError as error:
                raise ServiceFault(str(error), cause=error) from error
            if not (result.is_infra and left):
                return self._read(result), result
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


class AsyncPythonTool(_Tool):
    """The tool for asyncio. Concurrent calls travel together; use one for all rollouts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._client = AsyncClient(
            self._base_url, api_key=self._api_key, job=self._job, max_retries=self._max_retries
        )

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints, and the value of a last expression.

        Each call starts a new interpreter without network; numpy, scipy, sympy, pandas and
        networkx are there.

        Args:
            code: The program.

        Returns:
            What it printed, with a traceback or the limit that ended it.
        """
        text, _ = await self.run(code)
        return text

    async def run(self, code: str) -> tuple[str, RunResult | None]:
        """As :meth:`python`, with the result; None for a call that is no program.

        Raises:
            ServiceFault: after all retries.
        """
        request = self.request(code)
        return (request, None) if isinstance(request, str) else await self.submit(request)

    async def submit(self, request: RunRequest) -> tuple[str, RunResult | None]:
        """As :meth:`run`, for a request made from one of :meth:`request`."""
        for left in range(self._fault_retries, -1, -1):
            try:
                result = await self._client.submit(request)
            except PayloadTooLarge as error:
                return f"[invalid call: {error}]", None
            except RollyardError as error:
                raise ServiceFault(str(error), cause=error) from error
            if not (result.is_infra and left):
                return self._read(result), result
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        """Close this loop's connections."""
        await self._client.aclose()
