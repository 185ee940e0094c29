"""A whole service on this machine for as long as a ``with`` block lasts.

    with rollyard.local() as client:
        print(client.run("print(1 + 1)").stdout)

Guarantees: the service is private to this user (a Unix socket in a directory of mode 0700);
when the block ends, raises, or the process is killed, even by SIGKILL, nothing is left running.
"""

import asyncio
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from rollyard._async_client import AsyncClient
from rollyard._client import Client
from rollyard.errors import ServiceStartError

if TYPE_CHECKING:
    from rollyard._up import Plan

_log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
_GRACE_S = 5.0  # on top of what each of the three parts may take to stop


class LocalService:
    """What :func:`local` returns: enter it with ``with`` or ``async with``; use once."""

    def __init__(self, plan: "Plan") -> None:
        self._plan = plan
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self._client: Client | None = None
        self._async_client: AsyncClient | None = None
        self.address = ""
        """``unix:///path`` of the gateway, once started."""
        self.addresses: list[str] = []
        """Of all gateways, where the plan has several."""
        self.pids: dict[str, int] = {}
        """Process ids of the supervisor and the parts, as they were when it became ready."""

    def __enter__(self) -> Client:
        """Start the service and return a client of it.

        Raises:
            ServiceStartError: it did not start; the message holds the parts' last log lines.
        """
        self.start()
        try:
            self._client = Client(self.address)
        except BaseException:
            self.stop()
            raise
        return self._client

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._client is not None:
                self._client.close()
        finally:
            self.stop()

    async def __aenter__(self) -> AsyncClient:
        """As ``with``, for an event loop, which is not blocked meanwhile."""
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
            self._async_client = AsyncClient(self.address)
        except BaseException:
            # Cancelled, perhaps: the first stop makes the starting thread give up, the second
            # is for a supervisor that it had not started yet when we looked.
            await asyncio.to_thread(self.stop)
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.to_thread(self.stop)
            raise
        return self._async_client

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._async_client is not None:
                await self._async_client.aclose()
        finally:
            await asyncio.shield(asyncio.to_thread(self.stop))

    def start(self) -> Self:
        """Start the service without a client; see :attr:`address`. Call :meth:`stop` after.

        Raises:
            ServiceStartError: it did not start; the message holds the parts' last log lines.
        """
        if self._supervisor is not None:
            raise RuntimeError("a LocalService is used once; call rollyard.local() again")
        from rollyard._up import require_python

        require_python()
        read_fd, write_fd = os.pipe()
        try:
            self._supervisor = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "rollyard._supervise",
                 "--plan", json.dumps(dataclasses.asdict(self._plan)),
                 "--parent", str(os.getpid()), "--status-fd", str(write_fd)],
                stdin=subprocess.DEVNULL, pass_fds=[write_fd], start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        events = os.fdopen(read_fd)
        try:
            self._await_ready(events)
        except BaseException:
            events.close()
            self.stop()
            raise
        # The pipe is read to its end, or the supervisor would block on it some day.
        self._listener = threading.Thread(target=_drain, args=(events,), daemon=True)
        self._listener.start()
        return self

    def stop(self) -> None:
        """Stop the service and wait until all of it is gone. Safe to call twice."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        supervisor.terminate()
        try:
            supervisor.wait(self._plan.stop_timeout_s * 3 + _GRACE_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()  # the kernel then kills the parts
            supervisor.wait()
        if self._listener is not None:
            self._listener.join()

    def _await_ready(self, events: IO[str]) -> None:
        assert self._supervisor is not None
        for line in events:  # ends when the supervisor does, and the supervisor bounds each step
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "failed":
                raise ServiceStartError(event["message"])
            if event["event"] == "ready":
                self.address, self.addresses = event["address"], event["addresses"]
                self.pids = {"supervisor": self._supervisor.pid, **event["pids"]}
                return
        code = self._supervisor.wait()
        raise ServiceStartError(f"the supervisor ended with exit code {code} before it was ready")


def _drain(events: IO[str]) -> None:
    with events:
        for line in events:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "restart":
                _log.warning("%s\n%s", event["text"], "\n".join(event["log"][-20:]))


def local(
    *,
    slots: int | None = None,
    templates: Sequence[str] | None = None,
    allow_degraded: bool = False,
    start_timeout_s: float = 60.0,
) -> LocalService:
    """Start a whole service (Valkey, gateway, worker, jails) on this machine.

    Use it as ``with rollyard.local() as client:`` (a :class:`rollyard.Client`) or
    ``async with rollyard.local() as client:`` (a :class:`rollyard.AsyncClient`). The first use
    on a machine builds the guest image, which takes about a minute and needs a package index.
    Needs ``pip install 'rollyard[local]'`` and Python 3.12 or newer.

    Args:
        slots: runs at once; None: as the worker decides from the machine's cores.
        templates: warm interpreters to offer, of ``bare``, ``science`` and ``plot``; None: all.
            Libraries of those left out are not in the image.
        allow_degraded: start although the machine cannot give every sandbox layer.
        start_timeout_s: seconds until it must be ready, not counting the image.

    Raises:
        ServiceStartError: (on entering) it did not start.
    """
    # Not at the top: ``import rollyard`` is for every rollout process, this for a few.
    from rollyard._up import Plan

    return LocalService(
        Plan(
            slots=slots,
            templates=None if templates is None else tuple(templates),
            allow_degraded=allow_degraded,
            start_timeout_s=start_timeout_s,
            stop_timeout_s=STOP_TIMEOUT_S,
            sealed=True,
        )
    )
