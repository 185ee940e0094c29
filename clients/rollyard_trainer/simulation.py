"""What admission by KV cache gains over static allocation, in simulated time.

A model of engines, not of any one: an engine with n running rollouts gives each a token every
``1 + n / parallel`` ticks. Static allocation deals rollouts out evenly at the start and makes all
tool calls of a turn together; an engine whose cache is full evicts half of its running rollouts,
which then compute their tokens anew (as SGLang does, says the paper). Prefill costs
``1 / prefill`` of decoding.

Admission by the worst case wins where the cache is scarce for the batch, and loses where it is not:
then it keeps room free that nobody needs. Reserving about the mean length does better there.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is simulated; lengths in tokens, times in ticks (one token of a lone rollout)."""

    engines: int = 4
    rollouts: int = 256
    capacity: int = 60_000
    limit: int = 8192
    median: int = 4000
    spread: float = 0.8
    """Of the logarithm of lengths."""
    turn_tokens: int = 600
    tool: float = 30.0
    parallel: float = 64.0
    prefill: float = 20.0
    headroom: int = 64
    """Tokens per running rollout that must be free before another is admitted."""
    seed: int = 0

    def lengths(self) -> np.ndarray:
        """Tokens that each rollout will write, cut at ``limit``."""
        rng = np.random.default_rng(self.seed)
        drawn = rng.lognormal(np.log(self.median), self.spread, self.rollouts)
        return np.minimum(drawn, self.limit).astype(int)


@dataclass(slots=True)
class Outcome:
    """Figures of one simulation."""

    ticks: float = 0.0
    evictions: int = 0
    recomputed: int = 0
    idle: float = 0.0
    """Share of engine time in which nothing ran before the last engine was done."""


@dataclass(slots=True)
class _Engine:
    queue: deque[int]
    running: dict[int, int] = field(default_factory=dict[int, int])
    """Rollout to its tokens in the cache."""
    waiting: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(ready at, rollout) in a tool call; its tokens stay in the cache."""
    cached: dict[int, int] = field(default_factory=dict[int, int])
    clock: float = 0.0
    busy: float = 0.0


def simulate(scene: Scene, *, dynamic: bool, reserve: int | None = None) -> Outcome:
    """One batch of rollouts; ``dynamic``: admission, refill, asynchronous calls.

    ``reserve``: tokens reserved per rollout; default the worst case, ``limit``, which never evicts.
    """
    reserve = reserve or scene.limit
    lengths, done = scene.lengths(), np.zeros(scene.rollouts, dtype=int)
    outcome = Outcome()
    shared = deque(range(scene.rollouts))
    engines = [
        _Engine(shared if dynamic else deque(range(i, scene.rollouts, scene.engines)))
        for i in range(scene.engines)
    ]
    even = -(-scene.rollouts // scene.engines)  # the freest engine gets the next one
    room = min(even, max(1, scene.capacity // reserve)) if dynamic else scene.rollouts
    heap = [(0.0, i) for i in range(scene.engines)]
    while heap:
        _, index = heapq.heappop(heap)
        engine = engines[index]
        _admit(engine, scene, room, done, outcome)
        _return(engine, synchronous=not dynamic)
        if engine.running:
            _decode(engine, scene, lengths, done, outcome, dynamic)
        elif engine.waiting:
            engine.clock = max(engine.clock, min(at for at, _ in engine.waiting))
            if not dynamic:  # the turn goes on when all of its calls are back
                engine.clock = max(engine.clock, max(at for at, _ in engine.waiting))
        elif not engine.queue:
            continue
        heapq.heappush(heap, (engine.clock, index))
    outcome.ticks = max(engine.clock for engine in engines)
    busy = sum(engine.busy for engine in engines)
    outcome.idle = 1 - busy / (outcome.ticks * scene.engines)
    return outcome


def _held(engine: _Engine) -> int:
    return sum(engine.running.values()) + sum(engine.cached.values())


def _admit(engine: _Engine, scene: Scene, room: int, done: np.ndarray, outcome: Outcome) -> None:
    while engine.queue and len(engine.running) + len(engine.waiting) < room:
        tokens = int(done[engine.queue[0]])
        # Room for some tokens of each, or what was just evicted would come back to be evicted.
        growth = scene.headroom * (len(engine.running) + 1)
        if _held(engine) + tokens + growth > scene.capacity and _held(engine):
            return
        rollout = engine.queue.popleft()
        if tokens:  # it was evicted: its tokens are computed anew
            outcome.recomputed += tokens
            engine.clock += tokens / scene.prefill
            engine.busy += tokens / scene.prefill
        engine.running[rollout] = tokens


def _return(engine: _Engine, *, synchronous: bool) -> None:
    """Rollouts whose tool has answered run on; synchronously, only when none runs any more."""
    if synchronous and engine.running:
        return
    ready = [one for one in engine.waiting if one[0] <= engine.clock]
    engine.waiting = [one for one in engine.waiting if one[0] > engine.clock]
    for _, rollout in ready:
        engine.running[rollout] = engine.cached.pop(rollout)


def _decode(
    engine: _Engine, scene: Scene, lengths: np.ndarray, done: np.ndarray, outcome: Outcome,
    dynamic: bool,
) -> None:  # fmt: skip
    """Run until something happens: a turn or a rollout ends, a call returns, the cache is full."""
    count, pace = len(engine.running), 1 + len(engine.running) / scene.parallel
    left = min(
        min(int(lengths[r] - done[r]), scene.turn_tokens - int(done[r]) % scene.turn_tokens)
        for r in engine.running
    )
    spare = (scene.capacity - _held(engine)) // count
    if spare <= 0 and count > 1:  # full
        for rollout in list(engine.running)[count // 2 :]:
            del engine.running[rollout]
            engine.queue.appendleft(rollout)
            outcome.evictions += 1
        return
    steps = max(1, min(left, max(1, spare)))
    if dynamic and engine.waiting:
        until = min(at for at, _ in engine.waiting)
        steps = max(1, min(steps, int((until - engine.clock) / pace) + 1))
    engine.clock += steps * pace
    engine.busy += steps * pace
    for rollout in list(engine.running):
        done[rollout] += steps
        engine.running[rollout] += steps
        if done[rollout] >= lengths[rollout]:
            del engine.running[rollout]
        elif done[rollout] % scene.turn_tokens == 0:
            engine.cached[rollout] = engine.running.pop(rollout)
            engine.waiting.append((engine.clock + scene.tool, rollout))
