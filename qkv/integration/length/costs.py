"""Seconds that a step of n tokens takes, learnt while decoding; what was not measured is interpolated."""

from __future__ import annotations

from typing import Final

PRIOR_SLOPE: Final = 0.08
"""Cost of one more token, in steps of one token, until it is measured: hopeful, so that it will be measured."""


class Costs:
    """A running table of seconds by number of tokens.

    Not assumed monotone: matrix kernels change with the number of rows. A spike of a busy machine moves an
    entry little, a faster measurement at once half way.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def update(self, num_tokens: int, seconds: float) -> None:
        """One measurement."""
        old = self._seconds.get(num_tokens)
        if old is None:
            self._seconds[num_tokens] = seconds
        elif seconds < old:
            self._seconds[num_tokens] = (old + seconds) / 2
        else:
            self._seconds[num_tokens] = old + 0.1 * (min(seconds, 2 * old) - old)

    @property
    def is_known(self) -> bool:
        """Whether the step of one token was measured."""
        return 1 in self._seconds

    def relative(self, num_tokens: int) -> float:
        """Cost of a step of ``num_tokens`` in steps of one token."""
        one = self._seconds.get(1)
        if one is None:
            return 1 + PRIOR_SLOPE * (num_tokens - 1)
        if num_tokens in self._seconds:
            return self._seconds[num_tokens] / one
        below = max(n for n in self._seconds if n < num_tokens)
        above = min((n for n in self._seconds if n > num_tokens), default=None)
        low = self._seconds[below] / one
        if above is None:
            return low + PRIOR_SLOPE * (num_tokens - below)
        high = self._seconds[above] / one
        return low + (high - low) * (num_tokens - below) / (above - below)

    def seconds(self, num_tokens: int) -> float | None:
        """The measurement itself."""
        return self._seconds.get(num_tokens)
