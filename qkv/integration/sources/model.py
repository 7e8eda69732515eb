"""A smaller model as the source, with a cache of its own that rolls back the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from qkv.errors import QkvError
from qkv.integration.draft import Draft
from qkv.integration.hf_cache import KVCache
from qkv.integration.verify import Frame
from qkv.integration.walk import Row

MOST_PADDED_ROWS = 1024
"""Rows that two embedding tables of one tokenizer may differ by: padding for tensor parallelism."""
CHUNK = 128


class ModelSource:
    """Draft with a model of the same tokenizer.

    Its logits go through the target's processors and its choice uses the target's noise, so that it proposes
    what the target would choose if it had these logits.

    Args:
        model: the draft model.
        target: the model it drafts for.
        tokenizer, target_tokenizer: of the two, where known: they must have the same vocabulary.
        cache: settings of the draft's cache, as an empty cache; transformers' DynamicCache by default.

    Raises:
        QkvError: another vocabulary.
    """

    def __init__(
        self,
        model: Any,
        target: Any,
        *,
        tokenizer: Any = None,
        target_tokenizer: Any = None,
        cache: KVCache | None = None,
    ) -> None:
        self.model, self._cache = model, cache
        self.vocab_size = vocab_size(target)
        self._own_vocab_size = vocab_size(model)
        check_vocabulary(self._own_vocab_size, self.vocab_size, tokenizer, target_tokenizer)
        self._frame: Frame | None = None
        self._asked: list[int] = []

    @property
    def cache(self) -> Any:
        """The cache of the generation going on, or of the last one; None before the first."""
        return None if self._frame is None else self._frame.cache

    def begin(self, rows: Sequence[Row]) -> None:
        """Prefill the prompts but for their last token."""
        width = max(len(row) for row in rows)
        cache = DynamicCache(config=self.model.config) if self._cache is None else self._cache.empty()
        self._frame = Frame(self.model, cache, [width - len(row) for row in rows])
        ids = torch.stack([torch.nn.functional.pad(row.last(len(row)), (width - len(row), 0)) for row in rows])
        self._frame.prefill(self._known(ids[:, :-1]), CHUNK)
        self._frame.record()
        self._asked = [len(row) for row in rows]

    def draft(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        """One token after the other, all rows at once, up to the largest limit and the cache's room."""
        frame, missing = self._catch_up(rows)
        count = min(max(limits), frame.room() - missing + 1)
        logits = frame.forward(self._known(torch.stack([row.last(missing) for row in rows])))
        tokens: list[list[Tensor]] = [[] for _ in rows]
        log_q: list[list[Tensor | None]] = [[] for _ in rows]
        while True:
            for number, row in enumerate(rows):
                token, logs = row.propose(self._fit(logits[number, -1]), tokens[number])
                tokens[number].append(token)
                log_q[number].append(logs)
            if len(tokens[0]) >= count:
                break
            logits = frame.forward(self._known(torch.stack([row[-1] for row in tokens])[:, None]))
        return [_chain(*each) for each in zip(tokens, log_q, limits, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows."""
        if self._frame is not None:
            self._frame.select(rows)  # open tokens of the last draft move along
        self._asked = [self._asked[row] for row in rows]

    # --- inside ------------------------------------------------------------------------------------------

    def _catch_up(self, rows: Sequence[Row]) -> tuple[Frame, int]:
        """Commit what turned out right of the last draft; the frame, and how many tokens each row still lacks.

        All rows are brought to lack the same number, so that no padding comes between tokens.
        """
        frame = self._frame
        assert frame is not None
        right = self._right([len(row) for row in rows])
        lacking = [len(row) - length - count for row, length, count in zip(rows, frame.lengths, right, strict=True)]
        most = max(lacking)
        kept = [count - (most - lack) for count, lack in zip(right, lacking, strict=True)]
        if min(kept) < 0:
            self.begin(rows)
            assert self._frame is not None
            return self._frame, 1
        if frame.num_open:
            frame.commit(kept)
        while most > min(CHUNK, frame.room()):
            count = min(CHUNK, frame.room())
            frame.forward(self._known(torch.stack([row.last(most)[:count] for row in rows])))
            frame.commit([count] * len(rows))
            most -= count
        self._asked = [len(row) for row in rows]
        return frame, most

    def _right(self, lengths: Sequence[int]) -> list[int]:
        """Open tokens of each row that are its own, now that it has ``lengths`` tokens: those that it had when
        the draft was asked for, and the emitted ones but the last, which is the target's."""
        frame = self._frame
        assert frame is not None
        grown = [max(0, length - asked - 1) for length, asked in zip(lengths, self._asked, strict=True)]
        before = [asked - length for asked, length in zip(self._asked, frame.lengths, strict=True)]
        return [min(frame.num_open, old + new) for old, new in zip(before, grown, strict=True)]

    def _known(self, ids: Tensor) -> Tensor:
        """Ids that this model has; another stands in for those it lacks."""
        ids = ids.to(self.model.device)
        return torch.where(ids < self._own_vocab_size, ids, 0)

    def _fit(self, logits: Tensor) -> Tensor:
        """Logits over the target's ids, ``-inf`` for those that this model lacks."""
        missing = self.vocab_size - logits.shape[-1]
        if missing <= 0:
            return logits[: self.vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


def vocab_size(model: Any) -> int:
    """Rows of a model's output head."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def check_vocabulary(own: int, target: int, tokenizer: Any, target_tokenizer: Any) -> None:
    """Tolerate padded tables; refuse another tokenizer.

    Raises:
        QkvError: tokens that mean different things to the two models.
    """
    remedy = "draft with a model of the target's own family, or with source='lookup' or 'self:nf4'"
    if abs(own - target) > MOST_PADDED_ROWS:
        raise QkvError(f"the draft's vocabulary of {own:,} tokens is not the target's of {target:,}; {remedy}")
    if tokenizer is None or target_tokenizer is None:
        return
    mine, theirs = tokenizer.get_vocab(), target_tokenizer.get_vocab()
    odd = [token for token, number in mine.items() if number < min(own, target) and theirs.get(token) != number]
    if odd:
        raise QkvError(f"the draft's tokenizer differs from the target's in {len(odd):,} of its tokens; {remedy}")


def _chain(tokens: list[Tensor], log_q: list[Tensor | None], limit: int) -> Draft:
    tokens = tokens[:limit]
    if not tokens:
        return Draft.chain([])
    logs = [each for each in log_q[:limit] if each is not None]
    return Draft.chain(torch.stack(tokens), log_q=torch.stack(logs) if logs else None)
