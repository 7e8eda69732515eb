"""Prompt lookup: the text often repeats itself; go on as it went on before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qkv.errors import QkvError
from qkv.integration.draft import Draft
from qkv.integration.walk import Row


class Index:
    """The tokens of one row, and where each of them stands.

    Args:
        longest: tokens of a match that are compared at most.
        candidates: newest places that are compared.
    """

    def __init__(self, longest: int, candidates: int) -> None:
        self._longest, self._candidates = longest, candidates
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._distance: int | None = None

    def extend(self, ids: Sequence[int]) -> None:
        """Take in the tokens that are new."""
        for token in ids[len(self._ids) :]:
            at = len(self._ids)
            for length in range(1, min(at, 2) + 1):  # a place is indexed once a token follows it
                self._places.setdefault(tuple(self._ids[at - length :]), []).append(at)
            self._ids.append(token)

    def match(self) -> tuple[int, int]:
        """Where the text went on after the longest match of its end; and the match's length.

        Of places with equal matches it is the next one after where was copied from last, as a text that is copied
        with changes goes on behind the change; else one whose next token most of them share, the latest of these.
        """
        ids = self._ids
        for shortest in (2, 1):
            if len(ids) >= shortest and (places := self._places.get(tuple(ids[-shortest:]))):
                break
        else:
            return 0, 0
        lengths = {at: self._common(at, shortest) for at in reversed(places[-self._candidates :])}
        longest = max(lengths.values())
        at = self._pick([at for at, length in lengths.items() if length == longest])
        if longest > 1:
            self._distance = len(ids) - at
        return at, longest

    def follow(self, at: int, num_tokens: int) -> list[int]:
        """Tokens from ``at`` on; past the end of the text, as if it repeated itself."""
        period = len(self._ids) - at
        return [self._ids[at + step % period] for step in range(num_tokens)]

    def _pick(self, places: list[int]) -> int:
        ids = self._ids
        if self._distance is not None:
            due = len(ids) - self._distance
            if later := [at for at in places if at >= due]:
                return min(later)
        following = Counter(ids[at] for at in places)
        return max(places, key=lambda at: following[ids[at]])

    def _common(self, at: int, length: int) -> int:
        """Tokens before ``at`` that are those of the end; ``length`` of them are known to be."""
        ids, end = self._ids, len(self._ids)
        while length < min(self._longest, at) and ids[at - 1 - length] == ids[end - 1 - length]:
            length += 1
        return length


class Lookup:
    """Draft from the prompt and the output so far (Saxena, "prompt lookup decoding", 2023), indexed.

    Args:
        shortest: tokens that must match for a draft.
        longest: tokens of a match that are compared at most.
        candidates: newest places that are compared.

    Raises:
        QkvError: lengths that are no lengths.
    """

    def __init__(self, shortest: int = 1, longest: int = 32, candidates: int = 128) -> None:
        if not 1 <= shortest <= longest or candidates < 1:
            raise QkvError(f"lookup of {shortest} to {longest} tokens among {candidates} places: give 1 <= shortest")
        self.shortest, self.longest, self.candidates = shortest, longest, candidates
        self._indices: list[Index] = []

    def begin(self, rows: Sequence[Row]) -> None:
        """Index the prompts."""
        self._indices = [Index(self.longest, self.candidates) for _ in rows]
        for index, row in zip(self._indices, rows, strict=True):
            index.extend(row.ids)

    def draft(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        """What followed the longest match; whose length is the confidence."""
        return [self._draft(*each) for each in zip(self._indices, rows, limits, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other indices."""
        self._indices = [self._indices[row] for row in rows]

    def _draft(self, index: Index, row: Row, limit: int) -> Draft:
        index.extend(row.ids)
        at, length = index.match()
        if length < self.shortest or limit < 1:
            return Draft.chain([])
        return Draft.chain(index.follow(at, limit), confidence=length)
