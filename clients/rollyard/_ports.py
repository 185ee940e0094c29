"""TCP ports of this machine: which are free, and who holds one that is not."""

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollyard.errors import ServiceStartError

_LISTENING = "0A"  # the state of a socket in /proc/net/tcp
_TRIES = 20  # ports; each is free at one address already


class CannotListen(ServiceStartError):
    """A port is taken, or the address is not this machine's: other flags are needed."""


def free_ports(host: str, wanted: Sequence[int]) -> list[int]:
    """Distinct TCP ports of ``host`` that were free a moment ago; a wanted 0 is any.

    Looked at before a gateway starts: on a port that another service has, that one would answer
    our questions.

    Raises:
        CannotListen: a port is taken, or the address is not this machine's; the message says who
            has it, where that can be known, and what to do.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in wanted:
            try:
                ports.append(_bound(host, port, stack) if port else _any_bound(host, stack))
            except (OSError, OverflowError) as error:
                raise CannotListen(_explained(host, port, error)) from None
        return ports


def _any_bound(host: str, stack: contextlib.ExitStack) -> int:
    """A port that is free at the first address may be taken at the next: then try another."""
    for _ in range(_TRIES):
        with contextlib.suppress(_TakenBeside):
            return _bound(host, 0, stack)
    raise OSError(errno.EADDRINUSE, "")


def _bound(host: str, port: int, stack: contextlib.ExitStack) -> int:
    """Bind as uvloop's ``create_server`` does: every address of the name; the port that it is."""
    wanted = port
    for family, *_, place in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            one = stack.enter_context(socket.socket(family))
        except OSError:
            continue  # a family that this kernel does not have
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            one.bind((place[0], port, *place[2:]))
            # Two may be bound to one port, as long as none listens.
            one.listen(1)
        except OSError as error:
            if port != wanted and error.errno == errno.EADDRINUSE:
                raise _TakenBeside from None
            raise
        port = one.getsockname()[1]
    return port


class _TakenBeside(Exception):
    """A port that the kernel chose is taken at another address of the same name."""


def _explained(host: str, port: int, error: OSError | OverflowError) -> str:
    place = f"cannot listen on {host} port {port}"
    match error.errno if isinstance(error, OSError) else None:
        case errno.EADDRINUSE:
            who = port_holder(port) or "another process of this machine"
            return f"{place}: {who} has it. Choose another with --port; 0 takes a free one."
        case errno.EADDRNOTAVAIL:
            return f"{place}: this machine has no such address. Choose another with --host."
        case errno.EACCES:
            return f"{place}: this user may not. Choose one above 1023 with --port."
        case _:
            return f"{place}: {getattr(error, 'strerror', None) or error}"


def port_holder(port: int) -> str:
    """The process that listens on this TCP port, as ``process 42 (its name)``.

    Source: /proc/net/tcp, /proc/net/tcp6 and the descriptors of the processes that this user may
    look at; "" where that does not tell.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in Path("/proc").iterdir() if sockets else ():
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if process.name.isdigit() and sockets & set(_descriptors(process)):
                return f"process {process.name} ({_name(process)})"
    return ""


def _listening(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on it."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # no /proc here, or no IPv6
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _descriptors(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(descriptor.readlink())


def _name(process: Path) -> str:
    """The program's name; its command line may hold a password."""
    name = (process / "comm").read_bytes().decode(errors="replace").strip()
    return "".join(letter if letter.isprintable() else "?" for letter in name)
