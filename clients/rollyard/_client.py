"""The client for code without asyncio."""

import queue
import threading
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import aclosing
from typing import Literal, Self

from rollyard import _fork
from rollyard._async_client import AsyncClient
from rollyard._batch_stream import Progress
from rollyard._call import LimitsDict, RunLike
from rollyard._config import (
    DEFAULT_BATCH_MAX_DELAY_S,
    DEFAULT_BATCH_MAX_RUNS,
    DEFAULT_MAX_CONNECTIONS,
    DEFAULT_MAX_RETRIES,
    TransportKind,
)
from rollyard._loop_thread import LoopThread, outcome
from rollyard.types import Language, Limits, RunRequest, RunResult, Template


class Client:
    """Runs programs from ordinary code. Safe to share between threads.

    All threads' calls go through one background event loop, so calls that threads make at the
    same time travel together, as with :class:`rollyard.AsyncClient`, whose settings and errors
    it shares. A forked child gets a loop and connections of its own. A client can be pickled;
    its settings travel (the API key too). Close it with ``close()`` or ``with``; one that is
    dropped, or still open at exit, closes itself.
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
            AsyncClient(
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

    def _set_up(self, client: AsyncClient) -> None:
        self._async = client
        self._thread: LoopThread | None = None
        self._finalizer: weakref.finalize[[], Client] | None = None
        self._lock = threading.Lock()
        _fork.watch(self)

    def forked(self) -> object:
        """Start anew in a forked child (called by ``_fork``)."""
        inherited = (self._thread, self._finalizer)
        if self._finalizer is not None:
            self._finalizer.detach()  # the parent's thread does not exist here
        self._thread = self._finalizer = None
        self._lock = threading.Lock()  # another thread may have held it
        return inherited

    def __reduce__(self) -> tuple[object, ...]:
        return _from_async, (type(self), self._async)

    def __repr__(self) -> str:
        return repr(self._async).replace("AsyncClient", type(self).__name__, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; calls under way in other threads raise TransportError.

        The client may be used again; it then makes new connections.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            if self._finalizer is not None:
                self._finalizer.detach()
                self._finalizer = None
        if thread is not None:
            thread.call(self._async.aclose())
            thread.stop()

    def _loop(self) -> LoopThread:
        thread = self._thread
        if thread is None:
            with self._lock:
                thread = self._thread
                if thread is None:
                    thread = self._thread = LoopThread(keeps=self._async)
                    self._finalizer = weakref.finalize(self, thread.stop)
        return thread

    def run(
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

        Arguments, guarantees and errors are those of :meth:`rollyard.AsyncClient.run`. An
        interrupt (KeyboardInterrupt) cancels the run.
        """
        return self._loop().call(
            self._async.run(
                code,
                stdin=stdin,
                limits=limits,
                files=files,
                fetch_files=fetch_files,
                template=template,
                on_output_limit=on_output_limit,
                language=language,
                isolation=isolation,
                echo_last=echo_last,
                job=job,
                run_id=run_id,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
            )
        )

    def submit(self, request: RunRequest, *, timeout_s: float | None = None) -> RunResult:
        """Run one :class:`rollyard.RunRequest`; otherwise as :meth:`run`."""
        return self._loop().call(self._async.submit(request, timeout_s=timeout_s))

    def run_batch(
        self,
        requests: Iterable[RunLike],
        *,
        ordered: bool = False,
        job: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> Generator[RunResult, None, None]:
        """Run many programs; yield each result as its run finishes.

        As :meth:`rollyard.AsyncClient.run_batch`. The runs start at once, not with the first
        step of the iterator. ``progress`` is called in the background thread.
        """
        stream = self._async.run_batch(
            requests, ordered=ordered, job=job, timeout_s=timeout_s, progress=progress
        )
        results: queue.SimpleQueue[RunResult | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async with aclosing(stream):
                    async for result in stream:
                        results.put(result)
            finally:
                results.put(None)

        pumping = self._loop().start(pump())

        def drain() -> Generator[RunResult, None, None]:
            try:
                while (result := results.get()) is not None:
                    yield result
                outcome(pumping)
            finally:
                pumping.cancel()

        return drain()

    def run_all(
        self,
        requests: Iterable[RunLike],
        *,
        job: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> list[RunResult]:
        """Run many programs; return their results in order. Otherwise as :meth:`run_batch`."""
        return list(
            self.run_batch(requests, ordered=True, job=job, timeout_s=timeout_s, progress=progress)
        )

    def cancel(self, run_id: str) -> bool:
        """Cancel a run for all who wait for it; as :meth:`rollyard.AsyncClient.cancel`."""
        return self._loop().call(self._async.cancel(run_id))

    def stats(self) -> dict[str, float]:
        """Counts of the queue and the gateway (``GET /v1/stats``)."""
        return self._loop().call(self._async.stats())

    def healthy(self) -> bool:
        """Return True when the gateway's process answers. One try, no exception."""
        return self._loop().call(self._async.healthy())

    def ready(self) -> bool:
        """Return True when the gateway takes runs: its queue answers. One try, no exception."""
        return self._loop().call(self._async.ready())


def _from_async(cls: type[Client], client: AsyncClient) -> Client:
    made = cls.__new__(cls)
    made._set_up(client)  # pyright: ignore[reportPrivateUsage]
    return made
