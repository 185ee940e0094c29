"""The client for asyncio."""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Literal, Self, cast

from rollyard import _fork
from rollyard._batch_stream import BatchStream, Progress, in_order
from rollyard._call import PLAIN, LimitsDict, Options, RunLike
from rollyard._config import (
    DEFAULT_BATCH_MAX_DELAY_S,
    DEFAULT_BATCH_MAX_RUNS,
    DEFAULT_MAX_CONNECTIONS,
    DEFAULT_MAX_RETRIES,
    ClientConfig,
    TransportKind,
    make_config,
)
from rollyard._gateway import ClientLoad, GatewayLoad
from rollyard._link import Link
from rollyard._pacer import STRIDE
from rollyard._request import request_of
from rollyard._transport import transport_class
from rollyard.errors import BadRequest
from rollyard.types import RUN_ID_PATTERN, Language, Limits, RunRequest, RunResult, Template

_RUN_ID = re.compile(RUN_ID_PATTERN)


class AsyncClient:
    """Runs programs from asyncio code. Concurrent calls travel together.

    One client serves any number of concurrent calls, several event loops (one after the other or
    in several threads), and forked children: connections belong to a loop and a process and are
    made when first needed. They close with ``aclose()``, with ``async with``, or with their
    loop. A client can be pickled; its settings travel (the API key too), its connections do not.

    Args:
        base_url: ``http://host:port``, ``https://…`` or ``unix:///path/to.sock``; several of one
            service's gateways as a list, or with commas between them. Default: the environment
            variable ``ROLLYARD_URL``, else ``http://127.0.0.1:8000``.
        api_key: Bearer key. Default: ``ROLLYARD_API_KEY``, else none.
        job: The training job to which runs are accounted that name none.
        timeout_s: Seconds that one call may take in all, retries included; None: no bound but
            that of the retries. Not the time limit of the program: that is
            ``limits["timeout_s"]``.
        max_retries: Tries after the first, then the call fails. None: as long as ``timeout_s``
            allows; without one, until the service has given nobody an answer for 120 s (or for
            the run's ``deadline_s`` where that is longer; for 20 s where it never answered).
            Between tries it waits 0.1 s, 0.2 s, … 8 s, with jitter, or as long as the service
            asks for.
        batch_max_runs: Calls that travel in one request, at most. 64 fill one; more travel in
            one only where many wait.
        batch_max_delay_s: How long the first call waits for others to travel with it.
        max_connections: Requests under way at once. Beyond it, calls wait and batches grow.
        transport: ``"httpx2"``, or ``"aiohttp"`` for less CPU a request (needs
            ``rollyard[aiohttp]``).

    With several gateways, each request goes to the one that has least to do; one that fails or
    drains gets none until it works again, and its unanswered runs go to the others under the same
    ids. A gateway whose queue is full gets as many runs at once as it takes, and no more: what is
    above waits here (see :attr:`load`).

    Raises:
        ValueError: A setting is out of range.
        ImportError: aiohttp is asked for and not installed.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] | None = None,
        *,
        api_key: str | None = None,
        job: str = "default",
        timeout_s: float | None = None,
        max_retries: int | None = DEFAULT_MAX_RETRIES,
        batch_max_runs: int = DEFAULT_BATCH_MAX_RUNS,
        batch_max_delay_s: float = DEFAULT_BATCH_MAX_DELAY_S,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        transport: TransportKind = "httpx2",
    ) -> None:
        self._set_up(
            make_config(
                base_url,
                api_key=api_key,
                job=job,
                timeout_s=timeout_s,
                max_retries=max_retries,
                batch_max_runs=batch_max_runs,
                batch_max_delay_s=batch_max_delay_s,
                max_connections=max_connections,
                transport=transport,
            )
        )

    def _set_up(self, config: ClientConfig) -> None:
        transport_class(config.transport)
        self._config = config
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        _fork.watch(self)

    def forked(self) -> object:
        """Start anew in a forked child (called by ``_fork``)."""
        inherited, self._links = self._links, {}
        return inherited

    def __reduce__(self) -> tuple[object, ...]:
        return _from_config, (type(self), self._config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close this loop's connections; its calls under way raise TransportError.

        The client may be used again; it then makes new connections.
        """
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.aclose()

    @property
    def load(self) -> ClientLoad:
        """What this client has under way, in all its loops; reads counters, asks nobody."""
        links = list(self._links.values())
        lists = [[gateway.load for gateway in link.gateways] for link in links]
        waiting = sum(link.coalescer.waiting for link in links)
        loads = tuple(GatewayLoad.sum(same) for same in zip(*lists, strict=True))
        return ClientLoad(waiting, sum(load.in_flight for load in loads), loads)

    async def _link(self) -> Link:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None:
            for other in list(self._links):  # other threads' loops may come and go meanwhile
                if other.is_closed():
                    self._links.pop(other, None)
            link = self._links[loop] = Link(self._config)
            await link.open()
        return link

    async def run(
        self,
        code: str,
        *,
        stdin: str | None = None,
        limits: Limits | LimitsDict | None = None,
        files: Mapping[str, str | bytes] | None = None,
        fetch_files: Iterable[str] = (),
        template: Template = "auto",
        on_output_limit: Literal["truncate", "stop"] = "truncate",
        language: Language = "python",
        isolation: Literal["warm", "fresh"] = "warm",
        echo_last: bool = False,
        job: str | None = None,
        run_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> RunResult:
        """Run one program; return its result, whatever its outcome.

        Concurrent calls travel in one request, and each returns as soon as its own result comes.
        A call that is cancelled cancels its run and disturbs no other.

        Args:
            code: The program.
            stdin: Its standard input; None and ``""`` are both end of file at once.
            limits: What it may use; what is not named is at the service's default.
            files: Put into its working directory first: relative path to text or bytes.
            fetch_files: Paths to return in ``result.files``; ``*`` is all that it left.
            template: Warm interpreter to start from; ``"auto"`` looks at the imports.
            on_output_limit: ``"stop"`` ends a run that prints past ``output_bytes``.
            language: What ``code`` is written in: ``"python"``, ``"bash"`` or ``"cpp"``.
            isolation: ``"fresh"`` for a jail and an interpreter of its own; slower.
            echo_last: Show the value of a last expression on stdout, as a notebook does.
            job: The training job it is accounted to. Default: the client's.
            run_id: Idempotency key. Submitted twice, it runs once and both calls return the one
                result; with another program or other limits it is a Conflict. Default: a new
                one; retries of this call always use the same.
            priority: From -100 to 100. Among runs of one job that wait, higher go first; of equals
                the earliest deadline, then the oldest. Jobs take turns whatever their priorities.
            deadline_s: Seconds from now within which it must start, else it is ``expired``.
            timeout_s: Seconds for the whole call, waiting and retries included. Default: the
                client's; ``math.inf``: none. The program's own is ``limits["timeout_s"]``.

        Raises:
            BadRequest: An argument is malformed, or above what the service allows.
            Unauthorized: The key is missing or not accepted.
            Conflict: ``run_id`` belongs to another program.
            PayloadTooLarge: More bytes than the service takes.
            Overloaded: The queue was full at each try.
            Unavailable: The service was down at each try.
            TransportError: No usable answer came, for as long as it was tried.
            DeadlineExceeded: ``timeout_s`` passed.
        """
        options = PLAIN
        if (
            stdin is not None
            or limits is not None
            or files
            or fetch_files
            or template != "auto"
            or on_output_limit != "truncate"
            or language != "python"
            or isolation != "warm"
            or echo_last
            or priority
            or deadline_s is not None
        ):
            options = Options(
                stdin,
                # They are looked at later than the caller may change them.
                dict(limits) if isinstance(limits, dict) else limits,  # pyright: ignore[reportArgumentType]
                dict(files) if files else None,
                fetch_files,
                template,
                on_output_limit,
                language,
                isolation,
                echo_last,
                priority,
                deadline_s,
            )
        if job is None:
            job = self._config.job
        # Not through a coroutine more than needed: callers start ten thousand of these at once.
        link = self._links.get(asyncio.get_running_loop()) or await self._link()
        call = link.start(code, job, run_id, options, self._bound_s(timeout_s))
        try:
            return await call.future
        except asyncio.CancelledError:
            link.left(call)
            raise

    async def submit(self, request: RunRequest, *, timeout_s: float | None = None) -> RunResult:
        """Run one :class:`rollyard.RunRequest`; otherwise as :meth:`run`."""
        request = request_of(request, job=self._config.job, index=0)
        link = await self._link()
        bound_s = self._bound_s(timeout_s)
        call = link.start(request, request.job, request.run_id, PLAIN, bound_s)
        try:
            return await call.future
        except asyncio.CancelledError:
            link.left(call)
            raise

    def _bound_s(self, timeout_s: float | None) -> float | None:
        bound = timeout_s if timeout_s is not None else self._config.timeout_s
        if bound is None or bound == math.inf:
            return None
        if not bound > 0:
            raise BadRequest("timeout_s must be positive", status=422)
        return bound

    def run_batch(
        self,
        requests: Iterable[RunLike],
        *,
        ordered: bool = False,
        job: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> AsyncGenerator[RunResult, None]:
        """Run many programs; yield each result as its run finishes.

        A run to which the service gave no answer after all retries comes as ``infra_error``,
        with the SDK's error as its message, so that it costs no other its result; only if none
        at all was answered, that error is raised. Leaving the loop early and closing the
        iterator cancels what still runs.

        Args:
            requests: Programs, requests, or dicts with a request's fields. All are validated
                before the first is sent.
            ordered: Yield in the order of ``requests``, each as soon as those before it came.
            job: For those that name none. Default: the client's.
            timeout_s: Seconds for the whole batch. Default: the client's.
            progress: Called with (finished, total) after each run that finishes.

        Raises:
            BadRequest: An item is malformed (raised at once; the message names its place), or
                above what the service allows.
            RollyardError: As :meth:`run`.
        """
        name = job if job is not None else self._config.job
        checked = [_checked(item, name, index) for index, item in enumerate(requests)]
        return self._results(checked, name, ordered, self._bound_s(timeout_s), progress)

    async def _results(
        self,
        requests: list[str | RunRequest],
        job: str,
        ordered: bool,
        timeout_s: float | None,
        progress: Progress | None,
    ) -> AsyncGenerator[RunResult, None]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s if timeout_s is not None else None
        stream = BatchStream(await self._link(), requests, job=job, deadline=deadline)
        finished = stream.finished(progress=progress)
        # in_order closes what it reads from.
        async with aclosing(in_order(finished) if ordered else finished) as results:
            async for _, result in results:
                yield result

    async def run_all(
        self,
        requests: Iterable[RunLike],
        *,
        job: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> list[RunResult]:
        """Run many programs; return their results in order. Otherwise as :meth:`run_batch`.

        Checks the requests little by little, so that many of them do not hold up the loop.
        """
        name = job if job is not None else self._config.job
        checked: list[str | RunRequest] = []
        for index, item in enumerate(requests):
            checked.append(_checked(item, name, index))
            if not isinstance(item, str) and index % (4 * STRIDE) == 0:
                await asyncio.sleep(0)
        stream = self._results(checked, name, True, self._bound_s(timeout_s), progress)
        async with aclosing(stream) as results:
            return [result async for result in results]

    async def cancel(self, run_id: str) -> bool:
        """Cancel a run for all who wait for it; they get outcome ``cancelled``.

        Returns False when the service does not know the run (any more).

        Raises:
            RollyardError: As :meth:`run`.
        """
        if not _RUN_ID.fullmatch(run_id):
            raise BadRequest("run_id: malformed", status=422)
        link = await self._link()
        try:
            await link.short.ask("DELETE", f"/v1/runs/{run_id}")
        except BadRequest as error:
            if error.status == 404:
                return False
            raise
        return True

    async def stats(self) -> dict[str, float]:
        """Counts of the queue and the gateway (``GET /v1/stats``).

        Raises:
            RollyardError: As :meth:`run`.
        """
        link = await self._link()
        return cast("dict[str, float]", json.loads(await link.short.ask("GET", "/v1/stats")))

    async def healthy(self) -> bool:
        """Return True when a gateway's process answers. One try each, no exception."""
        return await (await self._link()).short.any_answers("/healthz")

    async def ready(self) -> bool:
        """Return True when a gateway takes runs: its queue answers. One try each, no exception."""
        return await (await self._link()).short.any_answers("/readyz")


def _checked(item: RunLike, job: str, index: int) -> str | RunRequest:
    # ASCII text is always a valid program; one that is too long is found when it is sent.
    if type(item) is str and item.isascii():
        return item
    return request_of(item, job=job, index=index)


def _from_config(cls: type[AsyncClient], config: ClientConfig) -> AsyncClient:
    client = cls.__new__(cls)
    client._set_up(config)  # pyright: ignore[reportPrivateUsage]
    return client
