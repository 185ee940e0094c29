"""An event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from rollyard.errors import TransportError

T = TypeVar("T")

STOP_TIMEOUT_S = 5.0


class LoopThread:
    """Runs coroutines for other threads. Starts at once; a daemon, so it never blocks exit.

    ``keeps`` lives until the loop has ended: what owns connections must not be garbage before
    the loop has closed them.
    """

    def __init__(self, keeps: object = None) -> None:
        self._keeps = keeps
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            stop = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()

        # asyncio.run ends what is left and closes connections: see Link.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(serve()), name="rollyard-client", daemon=True
        )
        self._thread.start()
        self._loop, self._stop = started.result()
        self._lock = threading.Lock()
        self._stopping = False

    def call(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine and wait for it; an interrupt here cancels it there.

        Raises:
            TransportError: the loop was stopped meanwhile; else what the coroutine raises.
        """
        return outcome(self.start(coroutine))

    def start(self, coroutine: Coroutine[object, object, T]) -> "Future[T]":
        """Run a coroutine without waiting.

        Raises:
            TransportError: the loop was stopped.
        """
        with self._lock:  # what is handed over before the stop is run or cancelled, never lost
            if not self._stopping:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise TransportError("the client was closed")

    def stop(self) -> None:
        """End the loop, and wait for it unless called from inside. May be called twice."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)


def outcome(future: "Future[T]") -> T:
    """Wait for what :meth:`LoopThread.start` returned; see :meth:`LoopThread.call`."""
    try:
        return future.result()
    except CancelledError:
        raise TransportError("the client was closed") from None
    except BaseException:
        future.cancel()
        raise
