"""When runs arrive: intended times, known before anything is sent.

Latency is counted from these times, however late the client itself is, so that a service which
stalls is charged for all that would have arrived meanwhile (no coordinated omission).
"""

import math
import random
from collections.abc import Iterator

_Z99 = 2.3263478740408408
"""99th percentile of the standard normal distribution."""


def poisson(rate_per_s: float, until_s: float, seed: str) -> Iterator[float]:
    """Times in seconds from 0 to ``until_s``; gaps are exponential with mean ``1 / rate_per_s``.

    Streams of several clients with rates r₁ … rₙ and different seeds are together a Poisson
    process of rate r₁ + … + rₙ. The same seed gives the same times.
    """
    chance = random.Random(f"poisson-{seed}")  # noqa: S311 - not for secrets
    at = chance.expovariate(rate_per_s)
    while at < until_s:
        yield at
        at += chance.expovariate(rate_per_s)


class Thinking:
    """Time between a tool's answer and the next call: log-normal, as token generation is."""

    def __init__(self, median_s: float, p99_s: float, seed: str) -> None:
        self._chance = random.Random(f"thinking-{seed}")  # noqa: S311 - not for secrets
        self._mu = math.log(median_s) if median_s > 0 else None
        self._sigma = math.log(max(p99_s, median_s) / median_s) / _Z99 if median_s > 0 else 0.0

    def draw_s(self) -> float:
        """Seconds; 0 when the median is."""
        return 0.0 if self._mu is None else self._chance.lognormvariate(self._mu, self._sigma)


def share(total: int, client: int, clients: int) -> int:
    """How many of ``total`` fall to client number ``client`` (from 0); sums up to the total."""
    return total // clients + (client < total % clients)
