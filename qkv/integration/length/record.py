"""Running acceptance of one kind of draft, depth by depth."""

from __future__ import annotations

from typing import Final

DECAY: Final = 0.9
PRIOR_WEIGHT: Final = 1.0


class Record:
    """Counts of the drafts of one confidence.

    Acceptance is kept for each depth on its own, because it is far from even: a copied passage goes on being
    right once its first tokens were, and a chance match goes wrong at once.

    Args:
        prior: acceptance at the first depth, until it is known; deeper ones start from the depth above.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._tested: list[float] = []
        self._right: list[float] = []

    def acceptances(self, num_tokens: int) -> list[float]:
        """For each depth the chance that its token is accepted, those before it being so."""
        found: list[float] = []
        for depth in range(num_tokens):
            prior = found[-1] if found else self._prior
            tested = self._tested[depth] if depth < len(self._tested) else 0.0
            right = self._right[depth] if depth < len(self._right) else 0.0
            found.append((right + PRIOR_WEIGHT * prior) / (tested + PRIOR_WEIGHT))
        return found

    def update(self, drafted: int, accepted: int) -> None:
        """One draft; the token after the last accepted one was tested too."""
        missing = drafted - len(self._tested)
        self._tested = [DECAY * count for count in self._tested] + [0.0] * missing
        self._right = [DECAY * count for count in self._right] + [0.0] * missing
        for depth in range(min(drafted, accepted + 1)):
            self._tested[depth] += 1
            self._right[depth] += depth < accepted
