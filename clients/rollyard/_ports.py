"""TCP ports of this machine: which are free, and who holds one that is not."""

import contextlib
import errno
import shlex
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollyard.errors import ServiceStartError

_LISTENING = "0A"  # the state of a socket in /proc/net/tcp
_SHOWN_COMMAND = 100  # characters


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
                family, *_, place = socket.getaddrinfo(
                    host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )[0]
                one = stack.enter_context(socket.socket(family))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(place)
                # Two may be bound to one port, as long as none listens.
                one.listen(1)
            except (OSError, OverflowError) as error:
                raise CannotListen(_explained(host, port, error)) from None
            ports.append(one.getsockname()[1])
        return ports


def _explained(host: str, port: int, error: OSError | OverflowError) -> str:
    place = f"cannot listen on {host} port {port}"
    match error.errno if isinstance(error, OSError) else None:
        case errno.EADDRINUSE:
            who = port_holder(port) or "another process of this machine"
            return f"{place}: {who} listens there. Choose another with --port; 0 takes a free one."
        case errno.EADDRNOTAVAIL:
            return f"{place}: this machine has no such address. Choose another with --host."
        case errno.EACCES:
            return f"{place}: this user may not. Choose one above 1023 with --port."
        case _:
            return f"{place}: {getattr(error, 'strerror', None) or error}"


def port_holder(port: int) -> str:
    """The process that listens on this TCP port, as ``process 42 (its command line)``.

    Source: /proc/net/tcp, /proc/net/tcp6 and the descriptors of the processes that this user may
    look at; "" where that does not tell.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for process in Path("/proc").iterdir() if sockets else ():
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if process.name.isdigit() and sockets & set(_descriptors(process)):
                return f"process {process.name} ({_command(process)})"
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


def _command(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    line = shlex.join(words[:-1])
    return line if len(line) <= _SHOWN_COMMAND else line[:_SHOWN_COMMAND] + "…"
