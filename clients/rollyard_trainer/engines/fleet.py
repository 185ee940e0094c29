"""Several servers of one model as one engine, admission by their KV caches (paper §3.2)."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from rollyard_trainer.engines import Sampling
from rollyard_trainer.engines.openai import ModelError, OpenAIEngine, ServerLost
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.scheduler import Scheduler
from rollyard_trainer.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
_TRIES_PER_SERVER = 3
_UNLIMITED = 1 << 20  # requests at once: the scheduler decides, not the connection


class Fleet:
    """Writes rollouts; see :class:`rollyard_trainer.engines.Engine`.

    A rollout waits until a server has room in its cache for the longest that it can become, goes
    to the one with most room, and stays there. The rollouts of a server that is lost begin anew on
    another; it is asked again before the next batch, and when all are lost. Use as an async context
    manager, which asks each server for its capacity.

    Args:
        base_urls: Such as ``http://127.0.0.1:8000/v1``, each with ``/metrics`` beside it.
        model: The name that all servers give it.
        capacity: Tokens of each server's cache, for servers that do not say, by address.
        reserve: Tokens to reserve for a response; default the most that it may take, which never
            evicts. About the mean is faster where caches are large for the batch; see
            ``rollyard-trainer schedule``.
        options: Of each :class:`OpenAIEngine`.
    """

    def __init__(
        self, base_urls: Sequence[str], model: str, *, capacity: Mapping[str, int] | None = None,
        reserve: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        options.setdefault("concurrency", _UNLIMITED)
        self._engines = {url: OpenAIEngine(url, model, **options) for url in base_urls}
        self._given, self._reserve = dict(capacity or {}), reserve
        self._stack, self._lost, self._asking = AsyncExitStack(), set[str](), asyncio.Lock()
        self.scheduler: Scheduler | None = None

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ModelError: a server does not say its capacity, and none was given.
        """
        try:
            for engine in self._engines.values():
                await self._stack.enter_async_context(engine)
            self.scheduler = Scheduler({url: await self._capacity(url) for url in self._engines})
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _capacity(self, url: str) -> int:
        return self._given.get(url) or await self._engines[url].kv_capacity()

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def rollout(
        self, prompts: Sequence[str], env: PythonToolEnv, sampling: Sampling
    ) -> list[Trajectory]:
        """One rollout per prompt, first come first served; the next begins as one ends.

        Raises:
            ExceptionGroup: of ModelError, a server refused or all are lost; of ValueError, a
                rollout could never fit.
        """
        if self.scheduler is None:
            raise ModelError("use the fleet as an async context manager")
        await self._ask_lost(self.scheduler)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._one(self.scheduler, text, env, sampling))
                for text in prompts
            ]
        return [task.result() for task in tasks]

    async def _one(
        self, scheduler: Scheduler, prompt: str, env: PythonToolEnv, sampling: Sampling
    ) -> Trajectory:
        first = next(iter(self._engines.values()))
        tokens = first.tokens_of(prompt) + (self._reserve or sampling.max_tokens)
        for left in reversed(range(_TRIES_PER_SERVER * len(self._engines))):
            async with scheduler.place(tokens) as url:
                try:
                    return await self._engines[url].one(prompt, env, sampling)
                except ServerLost as error:
                    if url not in self._lost:
                        _LOG.warning("its rollouts go elsewhere: %s", error)
                    self._lost.add(url)
                    if len(self._lost) == len(self._engines):
                        await self._ask_lost(scheduler)  # each may have been gone for a moment
                    if len(self._lost) == len(self._engines) or not left:
                        raise
                    if url in self._lost:
                        scheduler.close(url)
        raise AssertionError("the last try returns or raises")

    async def _ask_lost(self, scheduler: Scheduler) -> None:
        """Take back the lost servers that answer again."""
        async with self._asking:
            for url in tuple(self._lost):
                with suppress(ModelError):
                    await self._engines[url].check()
                    scheduler.open(url, await self._capacity(url))
                    self._lost.discard(url)
