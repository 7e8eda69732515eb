"""What a model will need at any context and batch, and how far a given memory goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qkv.memory.workspace import Steps

NO_LIMIT = 2**40
"""Tokens or sequences that count as any number: a bounded cache never fills the memory."""


@dataclass(frozen=True)
class Fit:
    """How far a memory goes.

    Attributes:
        memory_nbytes: the memory.
        longest_context: most tokens of each sequence, at the batch asked for, that never need more on the way; one
            more token does not fit. None: any number; 0: not one.
        largest_batch: most sequences at the context asked for, likewise.
    """

    memory_nbytes: int
    longest_context: int | None
    largest_batch: int | None


@dataclass(frozen=True)
class Forecast:
    """Peaks by context and batch.

    Attributes:
        resident_nbytes: what is there whatever the context: weights, buffers.
        steps: predicts cache and workspace.
        chunk: tokens of a prompt read at once.
    """

    resident_nbytes: int
    steps: Steps
    chunk: int

    def peak_nbytes(self, tokens: int, batch: int) -> int:
        """The most that is needed on the way to ``tokens`` tokens; never less for more tokens or sequences."""
        workspace = self.steps.workspace(tokens, batch, self.chunk).nbytes
        return self.resident_nbytes + self.steps.plan.high_water(tokens, batch) + workspace

    def fit(self, memory_nbytes: int, tokens: int, batch: int) -> Fit:
        """The longest context at ``batch``, and the largest batch at ``tokens``."""
        longest = _largest(lambda n: self.peak_nbytes(n, batch) <= memory_nbytes)
        most = _largest(lambda n: self.peak_nbytes(tokens, n) <= memory_nbytes)
        return Fit(memory_nbytes, longest, most)


def _largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, where all smaller ones do too; None for any number."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < NO_LIMIT and fits(high):
        low, high = high, 2 * high
    if high >= NO_LIMIT:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
