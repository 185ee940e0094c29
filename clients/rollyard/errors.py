"""What the SDK raises.

    RollyardError
    ├── RunFailed                 the program did not end with ``ok`` (raise_for_outcome only)
    ├── TransportError            no usable answer  (also ConnectionError)
    │   └── DeadlineExceeded      the call's own deadline passed  (also TimeoutError)
    ├── StatusError               the gateway refused
    │   ├── BadRequest            400, 404, 422  (also ValueError)
    │   ├── Unauthorized          401, 403  (also PermissionError)
    │   ├── Conflict              409: the run id belongs to another program  (also ValueError)
    │   ├── PayloadTooLarge       413  (also ValueError)
    │   ├── Overloaded            429, or 503 with ``overloaded``, for too long
    │   └── Unavailable           other 5xx, for too long
    └── ServiceStartError         rollyard.local() could not start the service

A program that fails is data (:class:`rollyard.RunResult`), not an exception. All are picklable:
rollouts cross processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.types import RunResult


class RollyardError(Exception):
    """Base of everything that Rollyard raises."""

    run_id: str = ""
    """The run that it is about, where it is about one."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # args alone would lose the fields, or call __init__ with the wrong ones.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(
    cls: type[RollyardError], args: tuple[Any, ...], state: dict[str, Any]
) -> RollyardError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class RunFailed(RollyardError):
    """The program did not end with outcome ``ok``; ``result`` says how it ended."""

    result: RunResult

    def __init__(self, result: RunResult) -> None:
        said = result.stderr.strip().rpartition("\n")[2]
        detail = said or result.message if result.outcome == "error" else result.message or said
        text = f"run {result.run_id} ended with {result.outcome}"
        super().__init__(f"{text}: {detail}" if detail else text, result=result)


class TransportError(RollyardError, ConnectionError):
    """No usable answer came back, for as long as the call was tried."""


class DeadlineExceeded(TransportError, TimeoutError):
    """The call's own deadline passed before an answer came."""


class StatusError(RollyardError):
    """The gateway answered with an error status."""

    status: int
    request_id: str = ""
    retry_after_s: float | None = None


class BadRequest(StatusError, ValueError):
    """The request is malformed; the message names the field."""


class Unauthorized(StatusError, PermissionError):
    """The key is missing or not accepted."""


class Conflict(StatusError, ValueError):
    """The run id was given to another program before. One id is one run: choose a new one."""


class PayloadTooLarge(StatusError, ValueError):
    """The request is larger than the gateway accepts."""


class Overloaded(StatusError):
    """The queue was full at each try; ``retry_after_s`` is the gateway's last word."""


class Unavailable(StatusError):
    """The gateway or its queue was down at each try."""


class ServiceStartError(RollyardError, RuntimeError):
    """rollyard.local() could not start the service; the message says why."""
