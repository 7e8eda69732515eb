"""One model and its cache, step by step: prefill in chunks, verify in one call, commit what was accepted."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkv.errors import QkvError, shown
from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache
from qkv.integration.hf_layer import KVLayer
from qkv.integration.upload import upload


class Frame:
    """A batch's committed tokens inside a model's cache.

    All rows end at the same column; row ``r`` begins at column ``starts[r]``, and what lies before is padding.
    A step is ``forward → commit``; what a commit does not keep leaves no trace. Where rows keep different
    numbers, the shorter ones move right, and columns that are padding everywhere are dropped.

    Args:
        model: of transformers, decoder only.
        cache: of transformers or ours; may hold a prefix already, of one row.
        starts: first real column of each row.

    Raises:
        QkvError: a cache that cannot take tokens back, where ``needs_rollback``.
    """

    def __init__(self, model: Any, cache: Any, starts: Sequence[int], *, needs_rollback: bool = True) -> None:
        if not hasattr(cache, "get_seq_length"):
            raise QkvError(f"cache {shown(cache)} is no cache; give a qkv.KVCache or one of transformers' own")
        self.model, self.cache, self.starts = model, cache, list(starts)
        self.seen = int(cache.get_seq_length())
        self.num_open = 0
        self.num_calls = 0
        self.is_recording = False
        self._cache_name = cache_argument(model)
        self._parameters = inspect.signature(model.forward).parameters
        self._check(needs_rollback)

    def room(self) -> int:
        """Tokens the next step may append, each attending as it would have alone."""
        return int(self.cache.room()) if isinstance(self.cache, KVCache) else 2**31

    @property
    def lengths(self) -> list[int]:
        """Real committed tokens of each row: the position of its next one."""
        return [self.seen - start for start in self.starts]

    def prefill(self, ids: Tensor, chunk: int) -> Tensor:
        """Commit a prompt ``[rows, tokens]``, padded on the left, never crossing the cache's room.

        Every token then attends to what it would have attended to one by one, so that the chunk changes nothing.

        Returns:
            Logits ``[rows, 1, vocabulary]`` after the last token, ``[rows, 0, 0]`` where there was none.
        """
        at, logits = 0, torch.zeros(ids.shape[0], 0, 0)
        while at < ids.shape[1]:
            count = min(chunk, self.room(), ids.shape[1] - at)
            logits = self._call(ids[:, at : at + count], keep_logits=1)[:, -1:]
            self.seen += count
            at += count
        return logits

    def record(self) -> None:
        """From now on a step stays open until its commit; without it, every commit keeps all."""
        self.is_recording = True
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()

    def stop_recording(self) -> None:
        """Leave the cache as transformers expects to find it."""
        self.is_recording = False
        for layer in getattr(self.cache, "layers", ()):
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[rows, n, vocabulary]`` of open tokens ``[rows, n]``."""
        logits = self._call(tokens)
        self.num_open += tokens.shape[1]
        return logits

    def commit(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[row]`` open tokens of each row."""
        width = max(kept)
        assert self.is_recording or set(kept) == {self.num_open}
        for layer in self.cache.layers if self.is_recording else ():
            if isinstance(layer, KVLayer):
                layer.core.commit(list(kept))
            else:
                _keep(layer, kept, self.num_open)
        self.starts = [start + width - count for start, count in zip(self.starts, kept, strict=True)]
        self.seen += width
        self.num_open = 0
        self._trim()

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        if len(rows) == len(self.starts):
            return
        if self.seen or self.num_open:
            self.cache.batch_select_indices(upload(rows, self.model.device))
        self.starts = [self.starts[row] for row in rows]
        self._trim()

    def _trim(self) -> None:
        """Drop columns that are padding in every row, where they take memory; rows of our blocks hold none."""
        empty = min(self.starts)
        if not empty or isinstance(self.cache, KVCache):
            return
        for layer in self.cache.layers:
            held = layer.keys.shape[-2]
            kept = min(held, layer.get_seq_length() - empty)
            layer.keys, layer.values = layer.keys[:, :, held - kept :], layer.values[:, :, held - kept :]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length -= empty
        self.starts = [start - empty for start in self.starts]
        self.seen -= empty

    def _call(self, tokens: Tensor, keep_logits: int = 0) -> Tensor:
        before = self.seen + self.num_open
        after = before + tokens.shape[1]
        given: dict[str, Any] = {self._cache_name: self.cache, "use_cache": True}
        positions = torch.arange(before, after, device=tokens.device)[None]
        if any(self.starts):
            starts = upload(self.starts, tokens.device)[:, None]
            positions = (positions - starts).clamp(min=0)
            given["attention_mask"] = (torch.arange(after, device=tokens.device)[None] >= starts).long()
        if "position_ids" in self._parameters:
            given["position_ids"] = positions.expand(tokens.shape[0], -1)
        if keep_logits and "logits_to_keep" in self._parameters:
            given["logits_to_keep"] = keep_logits
        self.num_calls += 1
        with torch.no_grad():
            logits: Tensor = self.model(tokens, **given).logits
        return logits

    def _check(self, needs_rollback: bool) -> None:
        if needs_rollback and not getattr(self.cache, "is_croppable", True):
            raise QkvError(
                f"{type(self.cache).__name__} cannot take tokens back; use qkv.KVCache or transformers' DynamicCache, "
                "or source='none'"
            )
        if len(self.starts) > 1:
            odd = [v for v in self.cache.layers if not isinstance(v, KVLayer) and not hasattr(v, "sliding_window")]
            names = {type(layer).__name__ for layer in odd} - {"DynamicLayer"}
            if names:
                raise QkvError(f"a batch needs a cache whose rows can move, not {', '.join(sorted(names))}")


def _keep(layer: Any, kept: Sequence[int], num_open: int) -> None:
    """Shift rows that keep fewer tokens to the right, then cut what no row keeps."""
    width = max(kept)
    if any(count != width for count in kept):
        shift = upload([width - count for count in kept], layer.keys.device)
        columns = torch.arange(layer.keys.shape[-2], device=layer.keys.device)
        index = (columns[None] - shift[:, None]).clamp(min=0)[:, None, :, None]
        layer.keys = layer.keys.gather(2, index.expand_as(layer.keys))
        layer.values = layer.values.gather(2, index.expand_as(layer.values))
    if num_open > width or hasattr(layer, "sliding_window"):
        layer.crop(width - num_open)
