"""Which engine a rollout goes to, and when: admission by KV cache (paper §3.2).

A rollout reserves the most that it can ever need, prompt plus response limit L, so an engine of
capacity C runs K = floor(C / L) of them and never evicts one. It stays on its engine, whose cache
has its prefix. The next begins as soon as one ends; tool calls go out at once, each by itself.
The paper describes this; its authors did not release it.
"""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class _Room:
    """An engine's cache, in tokens."""

    engine: str
    capacity: int
    free: int


class Scheduler:
    """Hands engines to rollouts, first come, first served.

    Args:
        capacity: KV cache of each engine in tokens; :func:`kv_capacity` reads it from an engine.
    """

    def __init__(self, capacity: Mapping[str, int]) -> None:
        if not capacity:
            raise ValueError("at least one engine, each with room for tokens")
        self._rooms: dict[str, _Room] = {}
        self._waiting: deque[tuple[int, asyncio.Future[_Room]]] = deque()
        for engine, tokens in capacity.items():
            self.open(engine, tokens)

    def open(self, engine: str, tokens: int) -> None:
        """Add an engine, or one that was closed, with all of its room."""
        if tokens <= 0:
            raise ValueError(f"{engine} has no room for tokens")
        self._rooms[engine] = _Room(engine, tokens, tokens)
        self._admit()

    def close(self, engine: str) -> None:
        """Send nothing more to an engine that is lost; closing it twice is closing it once."""
        self._rooms.pop(engine, None)
        self._admit()

    def free_tokens(self, engine: str) -> int:
        """Tokens of an engine that no rollout has reserved."""
        return self._rooms[engine].free

    @asynccontextmanager
    async def place(self, tokens: int) -> AsyncGenerator[str]:
        """Wait for an engine with room for ``tokens`` and keep that room until the block ends.

        Raises:
            ValueError: no engine could ever hold so many.
        """
        if error := self._too_large(tokens):
            raise error
        waiter: asyncio.Future[_Room] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, waiter))
        self._admit()
        try:
            room = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and not waiter.exception():
                self._give_back(waiter.result(), tokens)
            else:
                self._waiting = deque(one for one in self._waiting if one[1] is not waiter)
                self._admit()
            raise
        try:
            yield room.engine
        finally:
            self._give_back(room, tokens)

    def _too_large(self, tokens: int) -> ValueError | None:
        capacity = {room.engine: room.capacity for room in self._rooms.values()}
        if tokens <= max(capacity.values(), default=0):
            return None
        return ValueError(f"a rollout of {tokens} tokens fits no engine: {capacity}")

    def _give_back(self, room: _Room, tokens: int) -> None:
        room.free += tokens  # nobody's, if its engine was closed
        self._admit()

    def _admit(self) -> None:
        # In order: a long rollout is not overtaken for ever by short ones.
        while self._waiting:
            tokens, waiter = self._waiting[0]
            if not waiter.done():
                if error := self._too_large(tokens):
                    waiter.set_exception(error)
                else:
                    room = max(self._rooms.values(), key=lambda one: one.free)
                    if room.free < tokens:
                        return
                    room.free -= tokens
                    waiter.set_result(room)
            self._waiting.popleft()


def kv_capacity(metrics: str) -> int:
    """KV cache of an engine in tokens, from its ``/metrics`` page: vLLM or SGLang.

    With several data-parallel ranks in one page, that of all together.

    Raises:
        ValueError: the page says nothing of it.
    """
    total = 0
    for name, labels, value in _SAMPLE.findall(metrics):
        if name == "sglang:max_total_num_tokens":
            total += int(float(value))
        elif name == "vllm:cache_config_info":
            config = dict(_LABEL.findall(labels))
            if config.get("num_gpu_blocks", "").isdigit():
                total += int(config["num_gpu_blocks"]) * int(config["block_size"])
    if total <= 0:
        raise ValueError(
            "no vllm:cache_config_info with num_gpu_blocks and no sglang:max_total_num_tokens "
            "(SGLang needs --enable-metrics)"
        )
    return total
