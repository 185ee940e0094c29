"""What a model reads of a run, and what it must never read."""

import re
from typing import Final

from rollyard.errors import RollyardError
from rollyard.types import RunResult

DEFAULT_MAX_CHARS: Final = 10_000
_OF_THE_MACHINE: Final = re.compile(r" \(\d+ ms of waiting for a core not counted\)")
_ENDED: Final = {"ok", "error"}


class ServiceFault(BaseException):
    """The service could not run the program: nothing is known of it. Mask the rollout or stop.

    Not an ``Exception``, on purpose: agent loops (verl, TRL, LangChain, …) catch those in tools
    and show them to the model, which would learn from our faults. It is raised after all retries.
    """

    def __init__(self, message: str, *, cause: RollyardError | RunResult) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        """The SDK's error, or the result with an outcome that says nothing about the program."""

    def __reduce__(self) -> tuple[object, ...]:
        return _fault, (self.message, self.cause)


def _fault(message: str, cause: RollyardError | RunResult) -> ServiceFault:
    return ServiceFault(message, cause=cause)


def observation(result: RunResult, *, max_chars: int = DEFAULT_MAX_CHARS) -> str:
    """Text for the model: stdout, stderr, and how it ended unless it says so itself.

    Args:
        result: A run that ended; an uncaught exception is in its stderr.
        max_chars: Longer text loses its middle.

    Raises:
        ServiceFault: the result says nothing about the program.
    """
    if result.is_infra:
        text = f"{result.outcome}: {result.message}" if result.message else result.outcome
        raise ServiceFault(text, cause=result)
    parts = [part for part in (result.stdout.rstrip("\n"), result.stderr.rstrip("\n")) if part]
    if result.outcome not in _ENDED or (result.outcome == "error" and not result.stderr):
        parts.append(f"[{ending(result)}]")
    return shortened("\n".join(parts), max_chars) or "[no output]"


def ending(result: RunResult) -> str:
    """Outcome and message, less what the message says of the machine: how long a program had to
    wait for a core is another number each time, and nothing that a policy should learn from."""
    return f"{result.outcome}: {_OF_THE_MACHINE.sub('', result.message)}"


def shortened(text: str, max_chars: int) -> str:
    """The text, or its head and tail around a note of what is missing."""
    if len(text) <= max_chars:
        return text
    tail = max_chars // 2
    head = max_chars - tail
    missing = len(text) - max_chars
    return f"{text[:head]}\n[... {missing} characters left out ...]\n{text[len(text) - tail :]}"
