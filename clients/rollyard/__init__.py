"""Rollyard runs the Python that RL rollouts write.

    from rollyard import Client

    client = Client()
    print(client.run("print(1 + 1)").stdout)

``AsyncClient`` is the same for asyncio; ``local()`` starts a whole service on this machine.
"""

from rollyard._async_client import AsyncClient
from rollyard._client import Client
from rollyard._gateway import ClientLoad, GatewayLoad
from rollyard._version import __version__
from rollyard.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Overloaded,
    PayloadTooLarge,
    RollyardError,
    RunFailed,
    ServiceStartError,
    StatusError,
    TransportError,
    Unauthorized,
    Unavailable,
)

# Imported here and not at its first use: the function and its module share a name, and whichever
# is bound last in this package wins. The module is light; the service is imported by nobody here.
from rollyard.local import local
from rollyard.types import Limits, Outcome, RunRequest, RunResult

__all__ = [
    "AsyncClient",
    "BadRequest",
    "Client",
    "ClientLoad",
    "Conflict",
    "DeadlineExceeded",
    "GatewayLoad",
    "Limits",
    "Outcome",
    "Overloaded",
    "PayloadTooLarge",
    "RollyardError",
    "RunFailed",
    "RunRequest",
    "RunResult",
    "ServiceStartError",
    "StatusError",
    "TransportError",
    "Unauthorized",
    "Unavailable",
    "__version__",
    "local",
]
