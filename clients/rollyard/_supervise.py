"""Entry points of the supervisor: signals and a vanished parent become an orderly stop.

``python -m rollyard._supervise`` is the child that local() starts. It reports events as JSON
lines on a descriptor, and stops when the process that started it is gone, however it went.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from typing import TextIO

from rollyard._child import LogSink, discard
from rollyard._up import Event, Plan, Supervisor
from rollyard.errors import ServiceStartError


async def supervise(
    plan: Plan,
    *,
    announce: Callable[[Event], None],
    log: LogSink = discard,
    parent_pid: int | None = None,
) -> None:
    """Run a service until SIGINT, SIGTERM, SIGHUP or the end of ``parent_pid``.

    A second signal kills the parts instead of waiting for them.

    Raises:
        ServiceStartError: a part did not start.
    """
    stop = asyncio.Event()
    supervisor = Supervisor(plan, announce=announce, log=log)

    def asked() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked)
    with _watch_parent(parent_pid, stop):
        await supervisor.run(stop)


@contextlib.contextmanager
def _watch_parent(parent_pid: int | None, stop: asyncio.Event) -> Generator[None]:
    """Set ``stop`` when the parent process is gone.

    Not PR_SET_PDEATHSIG: that follows the thread that forked, and a notebook or an event loop
    may start us from a short-lived one. A pidfd follows the process.
    """
    if parent_pid is None:
        yield
        return
    try:
        handle = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        stop.set()
        yield
        return
    loop = asyncio.get_running_loop()
    try:
        if os.getppid() != parent_pid:  # it died, and its number may be another's by now
            stop.set()
        loop.add_reader(handle, stop.set)
        yield
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def main() -> int:
    """Supervise the service of a local() in another process."""
    parser = argparse.ArgumentParser(prog="python -m rollyard._supervise")
    parser.add_argument("--plan", required=True, help="JSON of a Plan")
    parser.add_argument("--parent", type=int, required=True, help="stop when this process is gone")
    parser.add_argument("--status-fd", type=int, required=True, help="where events are written")
    options = parser.parse_args()
    fields = json.loads(options.plan)
    if fields.get("templates") is not None:
        fields["templates"] = tuple(fields["templates"])
    with os.fdopen(options.status_fd, "w", buffering=1) as status:
        os.set_inheritable(status.fileno(), False)
        return _reported(Plan(**fields), parent_pid=options.parent, status=status)


def _reported(plan: Plan, *, parent_pid: int, status: TextIO) -> int:
    def announce(event: Event) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone; we are told by its pidfd
            status.write(json.dumps(event) + "\n")

    try:
        asyncio.run(supervise(plan, announce=announce, parent_pid=parent_pid))
    except ServiceStartError as error:
        announce({"event": "failed", "message": error.message})
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
