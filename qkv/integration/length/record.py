"""Running acceptance of drafted tokens, by how much of their context agreed."""

from __future__ import annotations

from typing import Final

DECAY: Final = 0.95
PRIOR_WEIGHT: Final = 3.0
UNKNOWN: Final = 0.5
"""Acceptance of a first token about whose context nothing is said."""
CHANCE: Final = 0.8
MOST: Final = 0.85
"""After m agreeing tokens the next agrees in ``1 - CHANCE / m`` of all cases, at most ``MOST``, until it is known
better: about what texts of several kinds show."""


class Record:
    """Counts by *agreement*: the tokens before a drafted one that are those of the place it was copied from.

    A draft that was found by a match of m tokens has an agreement of m at its first token, m + 1 at its second,
    and so on: once a copied passage is right it goes on being right, a chance match goes wrong at once. Drafts
    of confidence 0 (of a model) are counted by depth, each depth starting from what the one above has.
    """

    def __init__(self) -> None:
        self._tested: dict[tuple[bool, int], float] = {}
        self._right: dict[tuple[bool, int], float] = {}

    def acceptances(self, confidence: int, num_tokens: int) -> list[float]:
        """For each depth the chance that its token is accepted, those before it being so."""
        found: list[float] = []
        for depth in range(num_tokens):
            if confidence:
                prior = min(MOST, 1 - CHANCE / (confidence + depth))
            else:
                prior = found[-1] if found else UNKNOWN
            key = kind_of(confidence, depth)
            tested, right = self._tested.get(key, 0.0), self._right.get(key, 0.0)
            found.append((right + PRIOR_WEIGHT * prior) / (tested + PRIOR_WEIGHT))
        return found

    def update(self, confidence: int, drafted: int, accepted: int) -> None:
        """One draft; the token after the last accepted one was tested too."""
        for depth in range(min(drafted, accepted + 1)):
            key = kind_of(confidence, depth)
            self._tested[key] = DECAY * self._tested.get(key, 0.0) + 1
            self._right[key] = DECAY * self._right.get(key, 0.0) + (depth < accepted)


def kind_of(confidence: int, depth: int) -> tuple[bool, int]:
    """The class a drafted token is counted in. Agreements of 1, 2, 3 apart, then two classes a doubling, up to 32."""
    if not confidence:
        return False, depth
    agreement = min(confidence + depth, 32)
    if agreement < 4:
        return True, agreement
    doublings = agreement.bit_length() - 1
    return True, 2 * doublings + (agreement >> (doublings - 1) & 1)
