"""Latencies of any number, in constant memory, to three significant digits.

HdrHistogram (https://hdrhistogram.org) in its own Python port, whose encoding other tools read.
"""

import math
from collections.abc import Iterable
from typing import Any, Self

from hdrh.histogram import HdrHistogram

LOWEST_US, HIGHEST_US = 1, 24 * 3600 * 1_000_000
"""Range in microseconds: shorter counts as the first, longer (a day) as the second."""
DIGITS = 3
ERROR = 10.0**-DIGITS
"""Greatest relative error of a recorded value."""


_KEPT_BITS = 11
"""HdrHistogram tells values with three digits apart by their 11 leading bits."""


class Latencies:
    """A histogram of times in seconds."""

    def __init__(self) -> None:
        self._whole: Any = HdrHistogram(LOWEST_US, HIGHEST_US, DIGITS)  # it has no types
        self._new: dict[int, int] = {}

    def __len__(self) -> int:
        return int(self._counts.get_total_count())

    @property
    def _counts(self) -> Any:
        for value, count in self._new.items():
            self._whole.record_value(value, count)
        self._new.clear()
        return self._whole

    def record(self, seconds: float, count: int = 1) -> None:
        """Count a time; negative counts as 0.

        At 40,000 runs a second the library's own record_value, in Python too, would be a tenth of
        a core: equal values are gathered first, cut to the bits that it keeps anyway.
        """
        value = int(seconds * 1e6 + 0.5)
        if value < LOWEST_US:
            value = LOWEST_US
        elif value > HIGHEST_US:
            value = HIGHEST_US
        shift = value.bit_length() - _KEPT_BITS
        if shift > 0:
            value = value >> shift << shift
        self._new[value] = self._new.get(value, 0) + count

    def add(self, other: Self) -> None:
        """Count all of another's."""
        self._counts.add(other._counts)

    def quantile_s(self, q: float) -> float | None:
        """The time that a share ``q`` (0 to 1) did not exceed; None when empty."""
        return self._values([q])[0]

    @property
    def mean_s(self) -> float | None:
        """Mean; None when empty."""
        return self._counts.get_mean_value() / 1e6 if len(self) else None

    def quantiles(self, shares: Iterable[float]) -> dict[str, float | None]:
        """Share (as text) to seconds."""
        shares = list(shares)
        found = dict(zip(shares, self._values(shares), strict=True))
        return {f"{share:g}": found[share] for share in shares}

    def _values(self, shares: list[float]) -> list[float | None]:
        """Quantiles in one walk over the counts: a walk takes milliseconds."""
        if not len(self):
            return [None] * len(shares)
        percentiles = [share * 100 for share in shares]
        found: dict[float, int] = self._counts.get_percentile_to_value_dict(sorted(percentiles))
        return [found[percentile] / 1e6 for percentile in percentiles]

    def curve(self) -> list[tuple[float, float]]:
        """Points (share, seconds) of the whole distribution, denser towards its end."""
        if not len(self):
            return []
        # Up to the last one that a run stands behind: beyond it is only the maximum again.
        nines = math.log10(len(self)) if len(self) > 1 else 0.0
        steps = 40
        shares = [1 - 10 ** -(nines * step / steps) for step in range(steps + 1)]
        values = self._values([*shares, 1.0])
        return [(share, value or 0.0) for share, value in zip((*shares, 1.0), values, strict=True)]

    def encoded(self) -> str:
        """HdrHistogram's own compressed form, base64."""
        return str(self._counts.encode(), "ascii")

    @classmethod
    def decoded(cls, text: str) -> "Latencies":
        """Of what :meth:`encoded` gave.

        Raises:
            ValueError: it is not such a text.
        """
        made = cls()
        try:
            made._counts.decode_and_add(text.encode())
        except Exception as error:  # the library raises what its parts raise
            raise ValueError(f"not an encoded histogram: {error}") from None
        return made


def merged(texts: Iterable[str]) -> Latencies:
    """One histogram of several encoded ones."""
    whole = Latencies()
    for text in texts:
        if text:
            whole.add(Latencies.decoded(text))
    return whole
