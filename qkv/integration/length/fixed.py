"""Always the same number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.errors import QkvError
from qkv.integration.draft import Draft
from qkv.integration.length.base import Outcome


@dataclass(frozen=True)
class Fixed:
    """Draft ``num_tokens`` a step.

    Raises:
        QkvError: less than 0, or no whole number.
    """

    num_tokens: int = 5

    def __post_init__(self) -> None:
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int) or self.num_tokens < 0:
            raise QkvError(f"length {self.num_tokens!r} is not a whole number of tokens, 0 or more")

    def budget(self, limit: int) -> int:
        """``num_tokens``, where there is room."""
        return min(self.num_tokens, limit)

    def keep(self, draft: Draft) -> int:
        """All."""
        return len(draft)

    def update(self, outcome: Outcome) -> None:
        """Nothing to learn."""
