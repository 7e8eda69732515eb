"""The one loop: draft → verify in one call → walk → commit. Without a source it is plain decoding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.integration.draft import Draft
from qkv.integration.length.base import Length, Outcome
from qkv.integration.sampling import reads_are_cheap
from qkv.integration.sources.base import Source
from qkv.integration.sources.model import vocab_size
from qkv.integration.stats import DecodeStats
from qkv.integration.upload import upload
from qkv.integration.verify import Frame
from qkv.integration.walk import Row, walk


class _Seconds(NamedTuple):
    """Wall time, and what a policy learns from: on a CPU its own time, which neighbours do not disturb."""

    wall: float
    spent: float

    def since(self, earlier: _Seconds) -> _Seconds:
        return _Seconds(self.wall - earlier.wall, self.spent - earlier.spent)


class Loop:
    """One generation.

    Args:
        model: the target.
        source: of drafts, or None.
        length: how many tokens to draft.
        chunk: tokens of a prompt that are prefilled at once at most.
    """

    def __init__(self, model: Any, source: Source | None, length: Length, chunk: int) -> None:
        self.model, self.source, self.length, self.chunk = model, source, length, chunk
        self.vocab_size = vocab_size(model)
        self.stats = DecodeStats()
        self._nothing = Draft.chain(torch.zeros(0, dtype=torch.long, device=model.device))

    def run(self, rows: list[Row], cache: Any) -> Iterator[list[list[int]]]:
        """Generate until every row has ended; yields what each row emitted, ``[]`` for those that ended before.

        Raises:
            QkvError: a cache that cannot take tokens back, or that holds more than the prompt.
        """
        frame, logits = self._prefilled(rows, cache)
        alive = list(range(len(rows)))
        try:
            emitted = self._first(rows, logits)
            while alive:
                found: list[list[int]] = [[] for _ in rows]
                for row, tokens in zip(alive, emitted, strict=True):
                    found[row] = tokens
                alive = self._drop_finished(rows, alive, frame)
                yield found
                if alive:
                    emitted = self._step([rows[row] for row in alive], frame)
        finally:
            frame.stop_recording()

    def _prefilled(self, rows: list[Row], cache: Any) -> tuple[Frame, Tensor]:
        """The prompts committed, and the logits after them."""
        start = time.perf_counter()
        width = max(len(row) for row in rows)
        frame = Frame(self.model, cache, [width - len(row) for row in rows], needs_rollback=self.source is not None)
        if frame.seen and (len(rows) > 1 or frame.seen >= len(rows[0])):
            raise QkvError(f"the cache holds {frame.seen} tokens already; give it one prompt that goes beyond them")
        if self.source is not None:
            self.source.begin(rows)
        ids = torch.stack([torch.nn.functional.pad(row.last(len(row)), (width - len(row), 0)) for row in rows])
        logits = frame.prefill(ids[:, frame.seen :], self.chunk)
        if self.source is not None:
            frame.record()
        self.stats.target_calls = frame.num_calls
        self.stats.prefill_seconds = time.perf_counter() - start
        return frame, logits

    def _first(self, rows: list[Row], logits: Tensor) -> list[list[int]]:
        """Each row's first token, which the prompt's own call told."""
        emitted = walk(rows, [self._nothing] * len(rows), logits)
        for tokens in emitted:
            self.stats.count(0, len(tokens))
        self.stats.steps += 1
        return emitted

    def _step(self, rows: list[Row], frame: Frame) -> list[list[int]]:
        """Draft, verify in one call, walk, commit."""
        begin = self._now()
        drafts = self._draft(rows, frame.room())
        longest = max(len(draft) for draft in drafts)
        middle = self._now()
        blocks = [_block(row, draft, longest) for row, draft in zip(rows, drafts, strict=True)]
        logits = frame.forward(torch.stack(blocks))
        emitted = walk(rows, drafts, logits)
        frame.commit([len(tokens) for tokens in emitted])
        end = self._now()
        self._learn(drafts, emitted, middle.since(begin), end.since(middle))
        self.stats.target_calls = frame.num_calls
        return emitted

    def _draft(self, rows: list[Row], room: int) -> list[Draft]:
        """A draft of each row that crosses neither the room nor the row's end."""
        limits = [max(0, min(room, row.remaining) - 1) for row in rows]
        budget = self.length.budget(max(limits)) if self.source is not None and max(limits) else 0
        if self.source is None or budget < 1:
            return [self._nothing] * len(rows)
        limits = [min(limit, budget) for limit in limits]
        drafts = self.source.draft(rows, limits)
        if len(drafts) != len(rows) or not all(isinstance(draft, Draft) for draft in drafts):
            raise QkvError(f"{type(self.source).__name__} must return a Draft for each of {len(rows)} rows")
        return [self._cut(*each) for each in zip(drafts, limits, strict=True)]

    def _cut(self, draft: Draft, limit: int) -> Draft:
        """What the policy keeps, less what no model knows."""
        if not draft.is_chain:
            raise QkvError("this decoder verifies chains; the source drafted a tree")
        draft = draft.truncate(min(limit, self._known(draft.tokens)))
        if draft.log_q is None:
            draft = draft.truncate(max(0, self.length.keep(draft)))
        return replace(draft, tokens=upload(draft.tokens, self.model.device))

    def _known(self, tokens: Tensor) -> int:
        """Tokens before the first that the model has no row for; those on a device come from models, and are."""
        if not reads_are_cheap(tokens.device):
            return tokens.shape[0]
        return next((i for i, token in enumerate(tokens.tolist()) if not 0 <= token < self.vocab_size), len(tokens))

    def _learn(
        self, drafts: list[Draft], emitted: list[list[int]], draft_seconds: _Seconds, verify_seconds: _Seconds
    ) -> None:
        longest = max(len(draft) for draft in drafts)
        for draft, tokens in zip(drafts, emitted, strict=True):
            self.stats.count(len(draft), len(tokens))
        self.stats.time(draft_seconds.wall, verify_seconds.wall, is_plain=longest == 0)
        self.length.update(
            Outcome(
                drafts=tuple(len(draft) for draft in drafts),
                accepted=tuple(len(tokens) - 1 for tokens in emitted),
                confidences=tuple(draft.confidence for draft in drafts),
                verified=longest + 1,
                draft_seconds=draft_seconds.spent,
                verify_seconds=verify_seconds.spent,
            )
        )

    def _now(self) -> _Seconds:
        wall = time.perf_counter()
        return _Seconds(wall, time.process_time() if self.model.device.type == "cpu" else wall)

    def _drop_finished(self, rows: list[Row], alive: list[int], frame: Frame) -> list[int]:
        kept = [number for number, row in enumerate(alive) if not rows[row].is_finished]
        if kept and len(kept) < len(alive):
            frame.select(kept)
            if self.source is not None:
                self.source.select(kept)
        return [alive[number] for number in kept]


def _block(row: Row, draft: Draft, longest: int) -> Tensor:
    """A row's last token and its draft, filled up to the longest draft of the batch."""
    return torch.cat((row.last(1), torch.nn.functional.pad(draft.tokens, (0, longest - len(draft)))))
