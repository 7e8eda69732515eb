"""Timing on a machine that others use too: the entrants take turns in every round, and ratios are of one round."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from qkv.bench.machine import read_bandwidth

ROUND_SECONDS: Final = 0.02
"""An entrant's turn in a round lasts about so long (one call at least)."""
MAX_CALLS: Final = 200
COLD_NBYTES, MAX_COPIES = 160 * 2**20, 400
"""Copies of a weight add up to so much, so that none is still in the processor's caches when its turn comes."""

READS: Final = 4
"""Readings of memory a round: the fastest of all counts, and one that was held up does not."""

Run = Callable[[], object]


class Turn(NamedTuple):
    """Seconds a call took in one turn: the median of its calls, and the least."""

    median: float
    fastest: float


@dataclass
class Entrant:
    """Something to time.

    Args:
        name: what the table calls it.
        run: does it once.
        nbytes: bytes that one call cannot but read from memory; 0 where that says nothing.
        calls: calls a turn, found by :func:`interleave`.
    """

    name: str
    run: Run
    nbytes: int = 0
    calls: int = 1

    def turn(self) -> Turn:
        """Time ``calls`` calls."""
        seconds = []
        for _ in range(self.calls):
            start = time.perf_counter()
            self.run()
            seconds.append(time.perf_counter() - start)
        return Turn(statistics.median(seconds), min(seconds))


@dataclass(frozen=True)
class Measured:
    """The turns of each entrant, in the order of the rounds; and bytes a second read in between, if known."""

    turns: list[list[Turn]]
    bandwidth: float | None


def interleave(entrants: Sequence[Entrant], rounds: int, *, round_seconds: float = ROUND_SECONDS) -> Measured:
    """All entrants in turn, ``rounds`` times, each warmed up first; and the memory's speed in every round."""
    for entrant in entrants:
        entrant.calls = 1
        entrant.run()
        entrant.calls = max(1, min(MAX_CALLS, int(round_seconds / max(entrant.turn().fastest, 1e-7))))
    turns: list[list[Turn]] = [[] for _ in entrants]
    speeds = []
    for _ in range(rounds):
        for entrant, found in zip(entrants, turns, strict=True):
            found.append(entrant.turn())
        speeds += [read_bandwidth() for _ in range(READS)]
    known = [speed for speed in speeds if speed is not None]
    return Measured(turns, max(known) if known else None)


def rotating(nbytes: int, make: Callable[[], Callable[..., object]]) -> Callable[..., object]:
    """``make()`` as often as ``nbytes`` needs to stay cold; each call goes to the next of them."""
    copies = [make() for _ in range(max(2, min(MAX_COPIES, -(-COLD_NBYTES // max(nbytes, 1)))))]
    turns = itertools.cycle(copies)
    return lambda *args: next(turns)(*args)
