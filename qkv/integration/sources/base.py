"""Source: what proposes tokens. A wrong proposal costs time, never the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from qkv.integration.draft import Draft
from qkv.integration.walk import Row


@runtime_checkable
class Source(Protocol):
    """Proposes how each row goes on; keeps a state a row, which knows nothing of the other rows.

    One object serves one generation at a time.
    """

    def begin(self, rows: Sequence[Row]) -> None:
        """Forget the last generation; these rows start, with their prompts as tokens."""
        ...

    def draft(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        """For each row at most ``limits[row]`` tokens, perhaps none; the rows have grown since the last call."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Only these rows go on, by their numbers so far."""
        ...
