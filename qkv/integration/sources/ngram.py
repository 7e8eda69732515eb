"""An n-gram model: counts of what followed, learnt online, from text, or both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from qkv.errors import QkvError, shown
from qkv.integration.draft import Draft
from qkv.integration.walk import Row

Table = dict[tuple[int, ...], dict[int, int]]


class NGram:
    """Draft the most frequent continuation of the longest context that was seen, backing off to shorter ones.

    Args:
        order: tokens of the longest context.
        least: times that a continuation must have been seen.

    Raises:
        QkvError: an order below 1.

    Example:
        >>> source = NGram(order=2).fit([[1, 2, 3, 1, 2, 3]])
        >>> source.predict([9, 1, 2])
        (3, 2)
    """

    def __init__(self, order: int = 4, least: int = 1) -> None:
        if order < 1 or least < 1:
            raise QkvError(f"n-grams of order {order} seen {least} times: both must be at least 1")
        self.order, self.least = order, least
        self._fitted: Table = {}
        self._tables: list[Table] = []
        self._counted: list[int] = []

    def fit(self, sequences: Iterable[Sequence[int]]) -> NGram:
        """Count texts, given as token ids; they stay counted for all generations. Returns itself."""
        for ids in sequences:
            _count(self._fitted, ids, 1, self.order)
        return self

    def save(self, path: str | Path) -> None:
        """Write what was fitted, as JSON."""
        counts = [[list(context), sorted(found.items())] for context, found in self._fitted.items()]
        Path(path).write_text(json.dumps({"order": self.order, "least": self.least, "counts": counts}))

    @classmethod
    def load(cls, path: str | Path) -> NGram:
        """Read what :meth:`save` wrote.

        Raises:
            QkvError: another kind of file.
        """
        try:
            found = json.loads(Path(path).read_text())
            source = cls(found["order"], found["least"])
            source._fitted = {tuple(c): {int(t): int(n) for t, n in counts} for c, counts in found["counts"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise QkvError(f"{path} holds no saved n-grams ({shown(str(error))})") from error
        return source

    def predict(self, ids: Sequence[int], table: Table | None = None) -> tuple[int, int] | None:
        """The next token and the length of the context it was told from; None where nothing is known."""
        for length in range(min(self.order, len(ids)), 0, -1):
            context = tuple(ids[-length:])
            for counts in ((table or {}).get(context), self._fitted.get(context)):
                if counts and counts[token := _most_frequent(counts)] >= self.least:
                    return token, length
        return None

    def begin(self, rows: Sequence[Row]) -> None:
        """Start each row's own counts."""
        self._tables, self._counted = [{} for _ in rows], [1 for _ in rows]

    def draft(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        """The likeliest chain; the first context's length is its confidence."""
        return [self._draft(number, row, limit) for number, (row, limit) in enumerate(zip(rows, limits, strict=True))]

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows' counts."""
        self._tables = [self._tables[row] for row in rows]
        self._counted = [self._counted[row] for row in rows]

    def _draft(self, number: int, row: Row, limit: int) -> Draft:
        table = self._tables[number]
        _count(table, row.ids, self._counted[number], self.order)
        self._counted[number] = len(row.ids)
        tokens: list[int] = []
        context, confidence = row.ids[-self.order :], 0
        while len(tokens) < limit and (found := self.predict(context, table)) is not None:
            tokens.append(found[0])
            confidence = confidence or found[1]
            context = [*context, found[0]][-self.order :]
        return Draft.chain(tokens, confidence=confidence)


def _count(table: Table, ids: Sequence[int], first: int, order: int) -> None:
    """Count the tokens from number ``first`` on; the newest of a context is its last key."""
    for at in range(max(first, 1), len(ids)):
        for length in range(1, min(order, at) + 1):
            counts = table.setdefault(tuple(ids[at - length : at]), {})
            counts[ids[at]] = counts.pop(ids[at], 0) + 1


def _most_frequent(counts: dict[int, int]) -> int:
    """Of equal counts the newest."""
    return max(reversed(counts), key=lambda token: counts[token])
