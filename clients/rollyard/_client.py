"""The client for code without asyncio."""

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import aclosing
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rollyard import _fork
from rollyard._async_client import AsyncClient
from rollyard._batch_stream import Progress
from rollyard._call import RunLike
from rollyard._gateway import ClientLoad
from rollyard._loop_thread import LoopThread, outcome
from rollyard.types import RunResult

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(
    method: "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]",
) -> "Callable[Concatenate[Client, P], R]":
    """The same method for code without asyncio: arguments, guarantees, errors and docstring.

    An interrupt (KeyboardInterrupt) cancels what was asked for.
    """

    @functools.wraps(method)
    def call(self: "Client", *args: P.args, **kwargs: P.kwargs) -> R:
        asked = method(self._async, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]
        return self._loop().call(asked)  # pyright: ignore[reportPrivateUsage]

    return call


def _with_settings_of(
    init: "Callable[Concatenate[AsyncClient, P], None]",
) -> "Callable[[Callable[[Client, AsyncClient], None]], Callable[Concatenate[Client, P], None]]":
    """An ``__init__`` with the arguments of AsyncClient's, which gets the client they make."""

    def decorate(
        own: "Callable[[Client, AsyncClient], None]",
    ) -> "Callable[Concatenate[Client, P], None]":
        @functools.wraps(init)
        def made(self: "Client", *args: P.args, **kwargs: P.kwargs) -> None:
            client = AsyncClient.__new__(AsyncClient)
            init(client, *args, **kwargs)
            own(self, client)

        return made

    return decorate


class Client:
    """Runs programs from ordinary code. Safe to share between threads.

    All threads' calls go through one background event loop, so calls that threads make at the
    same time travel together, as with :class:`rollyard.AsyncClient`, whose settings and errors
    it shares. A forked child gets a loop and connections of its own. A client can be pickled;
    its settings travel (the API key too). Close it with ``close()`` or ``with``; one that is
    dropped, or still open at exit, closes itself.
    """

    @_with_settings_of(AsyncClient.__init__)
    def __init__(self, client: AsyncClient) -> None:
        self._set_up(client)

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

    run = _blocking(AsyncClient.run)
    submit = _blocking(AsyncClient.submit)
    run_all = _blocking(AsyncClient.run_all)
    cancel = _blocking(AsyncClient.cancel)
    stats = _blocking(AsyncClient.stats)
    healthy = _blocking(AsyncClient.healthy)
    ready = _blocking(AsyncClient.ready)

    @property
    def load(self) -> ClientLoad:
        """What this client has under way; as :attr:`rollyard.AsyncClient.load`."""
        return self._async.load

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


def _from_async(cls: type[Client], client: AsyncClient) -> Client:
    made = cls.__new__(cls)
    made._set_up(client)  # pyright: ignore[reportPrivateUsage]
    return made
