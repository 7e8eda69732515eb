"""Seconds that a step of n tokens takes, learnt while decoding; what was not measured is told from what was."""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Final

REMEMBERED: Final = 5
"""Newest measurements of a size, whose median counts: a spike of a busy machine moves nothing."""
PRIOR_JUMP: Final = 0.1
PRIOR_SLOPE: Final = 0.05
"""Cost of a second token and of each one more, in steps of one token, until it is measured."""


class Costs:
    """Median seconds by number of tokens.

    Not assumed monotone: matrix kernels change with the number of rows. One row has kernels of its own
    (matrix times vector), so that the costs of two and more are not drawn towards it.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def update(self, num_tokens: int, seconds: float) -> None:
        """One measurement."""
        self._seconds.setdefault(num_tokens, deque(maxlen=REMEMBERED)).append(seconds)

    def seconds(self, num_tokens: int) -> float | None:
        """Median of the newest measurements; of an even number the lower one, since noise only adds."""
        found = self._seconds.get(num_tokens)
        return median_low(found) if found else None

    @property
    def one(self) -> float | None:
        """Seconds of a step of one token; until it is measured, told from the longer ones by the prior."""
        measured = self.seconds(1)
        if measured is not None or not self._seconds:
            return measured
        return min(median_low(found) / _prior(n) for n, found in self._seconds.items())

    def relative(self, num_tokens: int) -> float:
        """Cost of a step of ``num_tokens`` in steps of one token."""
        one, sizes = self.one, [n for n in self._seconds if n > 1]
        if num_tokens == 1 or not one or not sizes:
            return _prior(num_tokens)
        below = max((n for n in sizes if n <= num_tokens), default=None)
        above = min((n for n in sizes if n >= num_tokens), default=None)
        if above is None:
            assert below is not None
            return median_low(self._seconds[below]) / one + PRIOR_SLOPE * (num_tokens - below)
        high = median_low(self._seconds[above]) / one
        if below is None or below == above:
            return high
        low = median_low(self._seconds[below]) / one
        return low + (high - low) * (num_tokens - below) / (above - below)


def _prior(num_tokens: int) -> float:
    return 1.0 if num_tokens == 1 else 1 + PRIOR_JUMP + PRIOR_SLOPE * (num_tokens - 1)
