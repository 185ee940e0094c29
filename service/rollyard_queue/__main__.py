"""``python -m rollyard_queue``: become the embedded server, and die with the parent process."""

import argparse
import os
import sys
from pathlib import Path

from rollyard_queue.embedded import (
    DEFAULT_MAXMEMORY_BYTES,
    ServerNotFound,
    exec_server,
    find_server,
    server_command,
)


def main(arguments: list[str] | None = None) -> int:
    """Replace this process by the server; return an exit code only where that fails."""
    parent_pid = os.getppid()
    parser = argparse.ArgumentParser(
        prog="python -m rollyard_queue",
        description="Run the embedded Valkey in the foreground: in memory, for this machine only.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, help="unix socket to listen on (mode 0600)")
    where.add_argument("--port", type=int, help="loopback port to listen on")
    parser.add_argument("--dir", type=Path, help="where server.log goes (default: to stdout)")
    parser.add_argument(
        "--maxmemory",
        type=int,
        default=DEFAULT_MAXMEMORY_BYTES,
        help="bytes after which new runs are refused (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        command = server_command(
            find_server(),
            socket=options.socket and options.socket.absolute(),
            port=options.port,
            # absolute: the server changes to its directory first
            directory=options.dir and options.dir.absolute(),
            maxmemory_bytes=options.maxmemory,
        )
    except (ServerNotFound, ValueError) as error:
        print(f"rollyard_queue: {error}", file=sys.stderr)  # noqa: T201 - a command's message
        return 2
    exec_server(command, parent_pid=parent_pid)
    return 1


if __name__ == "__main__":
    sys.exit(main())
