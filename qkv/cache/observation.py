"""What attention saw: kept apart until its queries are committed, then folded into the rows' statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.cache.row import Row


@dataclass
class Seen:
    """One step's sight of one row, all ``[tokens, ...]`` or None where not asked for."""

    mass: Tensor | None
    focus: Tensor | None
    queries: Tensor | None


class Observations:
    """Pending sights of open queries, and the newest committed queries.

    Args:
        num_observed: committed queries to remember for merging.
        half_life: tokens after which a committed query's attention counts half.
    """

    def __init__(self, num_observed: int, half_life: float) -> None:
        self.num_observed, self.half_life = num_observed, half_life
        self._pending: list[list[Seen]] = []
        self._recent: list[Tensor | None] = []

    @property
    def nbytes(self) -> int:
        """Bytes held, pending sights included."""
        pending = [t for row in self._pending for s in row for t in (s.mass, s.focus, s.queries) if t is not None]
        kept = [t for t in self._recent if t is not None]
        return sum(t.untyped_storage().nbytes() for t in (*pending, *kept))

    def add(self, row: int, batch: int, mass: Tensor | None, focus: Tensor | None, queries: Tensor | None) -> None:
        """Note what one row's open queries saw."""
        if len(self._pending) != batch:
            self._pending = [[] for _ in range(batch)]
        self._pending[row].append(Seen(mass, focus, queries if self.num_observed else None))

    def queries(self, row: int) -> Tensor | None:
        """The newest committed queries of a row, ``[heads, group, n, dim]``."""
        return self._recent[row] if row < len(self._recent) else None

    def commit(self, rows: Sequence[Row], chosen: Sequence[Sequence[int]] | None) -> None:
        """Fold in the sights of the chosen open queries (None: of all)."""
        pending, self._pending = self._pending, []
        if len(self._recent) != len(rows):
            self._recent = [None] * len(rows)
        for index, steps in enumerate(pending):
            kept = None if chosen is None else chosen[index]
            self._fold(rows[index], steps, kept)
            self._remember(index, steps, kept)

    def discard(self) -> None:
        """Forget what is pending."""
        self._pending = []

    def clear(self) -> None:
        """Forget everything."""
        self._pending, self._recent = [], []

    def cut(self, columns: int) -> None:
        """Forget the newest pending queries."""
        for steps in self._pending:
            left = columns
            while steps and left:
                size = _size(steps[-1])
                take = min(size, left)
                left -= take
                last = steps.pop()
                if take < size:
                    steps.append(_part(last, slice(0, size - take)))

    def select(self, order: Sequence[int]) -> None:
        """Follow a reorder of rows."""
        if self._recent:
            self._recent = [self._recent[i] for i in order]
        if self._pending:
            self._pending = [list(self._pending[i]) for i in order]

    def copy(self) -> Observations:
        """An independent copy (tensors are never written, so they are shared)."""
        other = Observations(self.num_observed, self.half_life)
        other._pending = [list(row) for row in self._pending]
        other._recent = list(self._recent)
        return other

    def load_queries(self, queries: list[Tensor | None]) -> None:
        """Remember what :meth:`queries` gave for each row."""
        self._recent = queries

    def _fold(self, row: Row, steps: list[Seen], kept: Sequence[int] | None) -> None:
        masses = [s.mass for s in steps if s.mass is not None]
        focuses = [s.focus for s in steps if s.focus is not None]
        if not masses:
            return
        row.mass = self._decayed(row.mass, masses, kept)
        row.focus = self._decayed(row.focus, focuses, kept)

    def _decayed(self, old: Tensor | None, seen: list[Tensor], kept: Sequence[int] | None) -> Tensor:
        blocks = max(max(t.shape[1] for t in seen), 0 if old is None else old.shape[0])
        rows = torch.cat([_widen(t, blocks) for t in seen])
        if kept is not None:
            rows = rows[list(kept)]
        ages = torch.arange(rows.shape[0] - 1, -1, -1, device=rows.device, dtype=torch.float32)
        new = (0.5 ** (ages / self.half_life)) @ rows
        if old is not None:
            new = new + _widen(old[None], blocks)[0] * 0.5 ** (rows.shape[0] / self.half_life)
        return new

    def _remember(self, index: int, steps: list[Seen], kept: Sequence[int] | None) -> None:
        queries = [s.queries for s in steps if s.queries is not None]
        if not queries:
            return
        new = torch.cat(queries, dim=2)
        if kept is not None:
            new = new[:, :, list(kept)]
        old = self._recent[index]
        joined = new if old is None else torch.cat((old, new), dim=2)
        self._recent[index] = joined[:, :, -self.num_observed :].clone()


def _size(seen: Seen) -> int:
    if seen.mass is not None:
        return seen.mass.shape[0]
    return seen.queries.shape[2] if seen.queries is not None else 0


def _part(seen: Seen, tokens: slice) -> Seen:
    return Seen(
        None if seen.mass is None else seen.mass[tokens],
        None if seen.focus is None else seen.focus[tokens],
        None if seen.queries is None else seen.queries[:, :, tokens],
    )


def _widen(rows: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, columns - rows.shape[1]))
