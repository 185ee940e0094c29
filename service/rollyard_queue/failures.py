"""What went wrong at the server, in words that say what to do.

Layer: from redis-py's exceptions to the queue's own. Passwords never get into a message: redis-py
puts none into its own, and of a URL only host, port or path is named.
"""

from typing import cast

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from rollyard_queue.base import QueueError, QueueUnavailable

MIN_VERSION = (7, 0)
"""Scripts with flags, which let results through a full server, came with Redis 7.0."""


class WrongPlace(QueueUnavailable):
    """This server does not have the shard (any more); the command has not run.

    ``to`` is the host and port that has it, where the server said so.
    """

    to: tuple[str, int] | None = None


class SlotMoving(QueueUnavailable):
    """The shard's keys are on their way between two nodes of a cluster; the command has not run."""


class WrongVersion(QueueUnavailable):
    """The server is older than what the scripts need."""


# Kind of error, or how its text begins; and what to do.
_ADVICE: tuple[tuple[type[Exception] | str, str], ...] = (
    (
        OutOfMemoryError,
        "it is full: new runs are refused until results have been fetched. Raise its maxmemory, or "
        "lower ROLLYARD_MAX_QUEUED_BYTES",
    ),
    (
        ReadOnlyError,
        "it is a read-only replica: name the primary in ROLLYARD_REDIS_URL, or the sentinels "
        "(redis+sentinel://host:26379,host:26379/name)",
    ),
    (
        AuthenticationError,
        "it wants another user or password: redis://user:password@host:port/0 in "
        "ROLLYARD_REDIS_URL (percent-encode what is special in URLs)",
    ),
    (
        "invalid username-password",  # how redis-py repeats WRONGPASS of a pooled connection
        "it wants another user or password: redis://user:password@host:port/0",
    ),
    (
        NoPermissionError,
        "its access rules keep this user from something: the queue needs all commands on keys "
        "{<queue>:*, EVALSHA, SCRIPT LOAD and INFO",
    ),
    (
        MovedError,
        "it is part of a cluster: ROLLYARD_REDIS_URL must be redis+cluster://host:port,host:port",
    ),
    (InvalidResponse, "what answers there is no Redis or Valkey"),
    ("SELECT is not allowed in cluster", "in a cluster the only database is 0"),
    ("BUSY ", "a script of somebody else keeps it busy (SCRIPT KILL)"),
    ("MISCONF ", "it cannot write its snapshots and refuses changes: see its log and disk"),
    ("NOREPLICAS ", "it wants more replicas than it has (min-replicas-to-write)"),
    ("UNBLOCKED ", "it has become a replica"),
    ("DENIED ", "it is in protected mode: it needs a password, or a loopback address"),
    ("LOADING", "it is starting"),
    (RedisTimeoutError, "it does not answer in time"),
    (
        RedisConnectionError,
        "is it running, and is ROLLYARD_REDIS_URL right?",
    ),
)
# What the server answered without having begun the command.
_ELSEWHERE = (MovedError, ReadOnlyError)
_MOVING = (AskError, TryAgainError)
_UNAVAILABLE = (ClusterError, OSError)


def as_queue_error(error: Exception, where: str = "the queue's server") -> QueueError:
    """Tell a server that is down, full or starting from one that refused the command.

    ``where`` names the server to people.
    """
    if isinstance(error, QueueError):
        return error
    text = str(error) or type(error).__name__
    for kind, advice in _ADVICE:
        if text.startswith(kind) if isinstance(kind, str) else isinstance(error, kind):
            message = f"{where} is not available ({text}): {advice}"
            if isinstance(error, _ELSEWHERE) or text.startswith("UNBLOCKED "):
                return _elsewhere(error, message)
            return QueueUnavailable(message)
    if isinstance(error, _MOVING):
        return SlotMoving(
            f"{where} is not available ({text}): the slot of this part of the queue is being moved "
            "between nodes; if that has stopped half-way, redis-cli --cluster fix ends it"
        )
    if isinstance(error, _UNAVAILABLE):
        return QueueUnavailable(f"{where} is not available: {text}")
    return QueueError(f"{where} refused: {text}")


def _elsewhere(error: Exception, message: str) -> WrongPlace:
    wrong_place = WrongPlace(message)
    # A node that does not know the other's address leaves the host out.
    if isinstance(error, MovedError):
        host, port = cast("tuple[str, int]", error.node_addr)  # pyright: ignore[reportUnknownMemberType]
        wrong_place.to = (host, port) if host else None
    return wrong_place


def check_version(info: bytes, where: str) -> None:
    """Look at the answer to INFO server.

    Raises:
        WrongVersion: the server is too old; the message says which it is.
    """
    fields = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    version = fields.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    # Valkey says what Redis it is compatible with: 7.2.4. A proxy may say nothing.
    if numbers and numbers < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise WrongVersion(
            f"{where} is Redis {version}, and the queue needs Redis {wanted} or newer, or Valkey: "
            "upgrade it, or let rollyard start its own"
        )
