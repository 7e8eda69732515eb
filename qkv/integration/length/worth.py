"""What a step's time is worth, and what it is worth to stand further in a passage that is being copied."""

from __future__ import annotations

from typing import Final

from qkv.integration.length.record import kind_of

DECAY: Final = 0.98
PRIOR_STEPS: Final = 8.0
"""Steps of one token each that are taken to have gone before."""


class Worth:
    """Running averages of a decision process: tokens for the cost of a step, and relative values by agreement.

    A draft that is accepted whole leaves the text further in the passage it copies, where the next draft is
    likelier right; after a wrong token nothing is known, which is worth 0.
    """

    def __init__(self) -> None:
        self._tokens = self._cost = PRIOR_STEPS
        self._values: dict[tuple[bool, int], float] = {}

    def update(self, tokens: float, cost: float) -> None:
        """A step emitted ``tokens`` a row and cost as much as ``cost`` steps of one token."""
        self._tokens = DECAY * self._tokens + tokens
        self._cost = DECAY * self._cost + cost

    @property
    def rate(self) -> float:
        """Tokens for the cost of a step of one token; at least 1, which plain decoding gives."""
        return max(1.0, self._tokens / self._cost)

    def ahead(self, agreement: int) -> float:
        """Tokens that it is worth above an average place to stand behind ``agreement`` copied tokens."""
        return self._values.get(kind_of(agreement, 0), 0.0)

    def remember(self, agreement: int, value: float) -> None:
        """What the best choice at this agreement is worth."""
        if agreement:
            self._values[kind_of(agreement, 0)] = value
