"""The client for asyncio."""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Literal, Self, cast

from rollyard import _fork
from rollyard._batch_stream import BatchStream, Progress, in_order
from rollyard._call import Call, LimitsDict, RunLike, make_request, request_of
from rollyard._config import (
    DEFAULT_BATCH_MAX_DELAY_S,
    DEFAULT_BATCH_MAX_RUNS,
    DEFAULT_MAX_CONNECTIONS,
    DEFAULT_MAX_RETRIES,
    ClientConfig,
    TransportKind,
    make_config,
)
from rollyard._link import Link
from rollyard._transport import transport_class
from rollyard.errors import BadRequest, DeadlineExceeded, RollyardError
from rollyard.types import RUN_ID_PATTERN, Language, Limits, RunRequest, RunResult, Template

_RUN_ID = re.compile(RUN_ID_PATTERN)


class AsyncClient:
    """Runs programs from asyncio code. Concurrent calls travel together.

    One client serves any number of concurrent calls, several event loops (one after the other or
    in several threads), and forked children: connections belong to a loop and a process and are
    made when first needed. They close with ``aclose()``, with ``async with``, or with their
    loop. A client can be pickled; its settings travel (the API key too), its connections do not.

    Args:
        base_url: ``http://host:port``, ``https://…`` or ``unix:///path/to.sock``. Default: the
            environment variable ``ROLLYARD_URL``, else ``http://127.0.0.1:8000``.
        api_key: Bearer key. Default: ``ROLLYARD_API_KEY``, else none.
        job: The training job to which runs are accounted that name none.
        timeout_s: Seconds that one call may take in all, retries included; None: no bound but
            that of the retries. Not the time limit of the program: that is
            ``limits["timeout_s"]``.
        max_retries: Tries after the first. Waits 0.1 s, 0.2 s, … 8 s, with jitter, or as long
            as the service asks for.
        batch_max_runs: Calls that travel in one request, at most.
        batch_max_delay_s: How long the first call waits for others to travel with it.
        max_connections: Requests under way at once. Beyond it, calls wait and batches grow.
        transport: ``"httpx2"``, or ``"aiohttp"`` for less CPU a request (needs
            ``rollyard[aiohttp]``).

    Raises:
        ValueError: A setting is out of range.
        ImportError: aiohttp is asked for and not installed.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        job: str = "default",
        timeout_s: float | None = None,
        max_retries: int = DEFAULT_MAX_RETRIES,
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
                result. Default: a new one; retries of this call always use the same.
            deadline_s: Seconds from now within which it must start, else it is ``expired``.
            timeout_s: Seconds for the whole call, waiting and retries included. Default: the
                client's; ``math.inf``: none. The program's own is ``limits["timeout_s"]``.

        Raises:
            BadRequest: An argument is malformed, or above what the service allows.
            Unauthorized: The key is missing or not accepted.
            PayloadTooLarge: More bytes than the service takes.
            Overloaded: The queue was full at each try.
            Unavailable: The service was down at each try.
            TransportError: No usable answer came, after all retries.
            DeadlineExceeded: ``timeout_s`` passed.
        """
        request = make_request(
            code,
            job=job if job is not None else self._config.job,
            stdin=stdin,
            limits=limits,
            files=files,
            fetch_files=fetch_files,
            template=template,
            on_output_limit=on_output_limit,
            language=language,
            isolation=isolation,
            echo_last=echo_last,
            run_id=run_id,
            deadline_s=deadline_s,
        )
        return await self._answer(request, self._bound_s(timeout_s))

    async def submit(self, request: RunRequest, *, timeout_s: float | None = None) -> RunResult:
        """Run one :class:`rollyard.RunRequest`; otherwise as :meth:`run`."""
        request = request_of(request, job=self._config.job, index=0)
        return await self._answer(request, self._bound_s(timeout_s))

    async def _answer(self, request: RunRequest, timeout_s: float | None) -> RunResult:
        link = await self._link()
        call = Call(request)
        link.coalescer.submit(call)
        try:
            if timeout_s is None:
                return await call.future
            async with asyncio.timeout(timeout_s):
                return await call.future
        except asyncio.CancelledError:
            link.abandon([call])
            raise
        except TimeoutError:
            if call.own_id:  # with an id of the caller's, the next call may ask for the result
                link.abandon([call])
            message = f"no result within {timeout_s:g} s"
            raise DeadlineExceeded(message, run_id=call.run_id) from None

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
        checked = [request_of(item, job=name, index=i) for i, item in enumerate(requests)]
        return self._results(checked, ordered, self._bound_s(timeout_s), progress)

    async def _results(
        self,
        requests: list[RunRequest],
        ordered: bool,
        timeout_s: float | None,
        progress: Progress | None,
    ) -> AsyncGenerator[RunResult, None]:
        finished = self._finished(requests, timeout_s, progress)
        # in_order closes what it reads from.
        async with aclosing(in_order(finished) if ordered else finished) as results:
            async for _, result in results:
                yield result

    async def _finished(
        self, requests: list[RunRequest], timeout_s: float | None, progress: Progress | None
    ) -> AsyncGenerator[tuple[int, RunResult], None]:
        refill = self._config.batch_max_runs
        # Half of the connections: single calls must not wait behind a batch of a million.
        window = refill * max(1, self._config.max_connections // 2)
        loop = asyncio.get_running_loop()
        stream = BatchStream(await self._link(), requests, window=window, refill=refill)
        deadline = loop.time() + timeout_s if timeout_s is not None else None
        async with aclosing(stream.finished(deadline=deadline, progress=progress)) as finished:
            async for place, result in finished:
                yield place, result

    async def run_all(
        self,
        requests: Iterable[RunLike],
        *,
        job: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> list[RunResult]:
        """Run many programs; return their results in order. Otherwise as :meth:`run_batch`."""
        stream = self.run_batch(
            requests, ordered=True, job=job, timeout_s=timeout_s, progress=progress
        )
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
            await link.request("DELETE", f"/v1/runs/{run_id}")
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
        return cast("dict[str, float]", json.loads(await link.request("GET", "/v1/stats")))

    async def healthy(self) -> bool:
        """Return True when the gateway's process answers. One try, no exception."""
        return await self._probe("/healthz")

    async def ready(self) -> bool:
        """Return True when the gateway takes runs: its queue answers. One try, no exception."""
        return await self._probe("/readyz")

    async def _probe(self, path: str) -> bool:
        link = await self._link()
        try:
            await link.request("GET", path, retry=False)
        except RollyardError:
            return False
        return True


def _from_config(cls: type[AsyncClient], config: ClientConfig) -> AsyncClient:
    client = cls.__new__(cls)
    client._set_up(config)  # pyright: ignore[reportPrivateUsage]
    return client
