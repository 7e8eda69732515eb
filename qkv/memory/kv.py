"""Bytes of a key-value cache before it is made, layer by layer; a cache it does not understand is said, not guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from qkv.cache.plan import kv_nbytes, sealed_token_nbytes
from qkv.cache.retention import Importance, Window
from qkv.cache.retention.sizes import parse_budget
from qkv.cache.settings import DEFAULT_BLOCK_SIZE
from qkv.integration.anatomy import FULL, SLIDING, Anatomy, CachedLayer, UnknownCacheError

NO_BUDGET = "1000000TB"


@dataclass(frozen=True)
class KvRow:
    """Layers that keep the same, together.

    Attributes:
        kind: how they attend: ``"full"``, ``"sliding 512"``, ``"state"`` or ``"none"`` (no cache of their own).
        heads: ``"multi-head"``, ``"grouped-query"``, ``"multi-query"`` or ``"latent (MLA)"``; empty without any.
        num_layers: how many there are.
        token_nbytes: what one more token of one sequence adds in all of them, until a window or budget is full.
        nbytes: all they hold at the context and batch asked for.
    """

    kind: str
    heads: str
    num_layers: int
    token_nbytes: float
    nbytes: int


@dataclass(frozen=True)
class KvPlan:
    """What a model's cache will hold, for any context and batch.

    Attributes:
        anatomy: of the model.
        dtype: of keys and values that are stored exactly.
        settings: ``keys``, ``values``, ``retain`` and so on of a :class:`qkv.KVCache`; empty for transformers' own.
    """

    anatomy: Anatomy
    dtype: torch.dtype
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.settings and not any(self.is_ours(layer) for layer in self.anatomy.layers):
            raise UnknownCacheError("it has no attention layer that can be held in blocks")

    @cached_property
    def _counts(self) -> Counter[CachedLayer]:
        return Counter(self.anatomy.layers)

    def is_ours(self, layer: CachedLayer) -> bool:
        """Whether a :class:`qkv.KVCache` with these settings holds the layer in blocks; it leaves others alone."""
        if not self.settings:
            return False
        full = any(other.source == FULL for other in self.anatomy.layers)
        return layer.source == FULL or (layer.source == SLIDING and not full)

    def nbytes(self, tokens: int, batch: int) -> int:
        """Bytes held once ``tokens`` tokens of each of ``batch`` sequences are committed; exact.

        The most it holds for :class:`qkv.Importance`; a window's summary is not counted, which ``str`` says.
        """
        return sum(self._row_nbytes(tokens, batch).values())

    def high_water(self, tokens: int, batch: int) -> int:
        """The most that is held on the way to ``tokens`` tokens: a block that is sealed shrinks.

        What is held repeats its ups and downs with every block, on a higher level: so the last block's worth of
        lengths has the maximum.
        """
        if not self.settings:
            return self.nbytes(tokens, batch)
        size = int(self.settings.get("block_size", DEFAULT_BLOCK_SIZE))
        return max(self.nbytes(n, batch) for n in range(max(0, tokens - size + 1), tokens + 1))

    def rows(self, tokens: int, batch: int) -> tuple[KvRow, ...]:
        """The same by kind of layer, in the order of the model."""
        nbytes = self._row_nbytes(tokens, batch)
        return tuple(
            KvRow(_kind(layer), self._heads(layer), count, count * self._token_nbytes(layer), nbytes[layer])
            for layer, count in self._counts.items()
        )

    def _row_nbytes(self, tokens: int, batch: int) -> dict[CachedLayer, int]:
        found = {layer: count * self._layer_nbytes(layer, tokens, batch) for layer, count in self._counts.items()}
        retain = self.settings.get("retain")
        kind, amount = parse_budget(retain.budget) if isinstance(retain, Importance) else ("tokens", 0.0)
        if kind == "bytes":
            left = int(amount) - sum(n for layer, n in found.items() if layer.source == SLIDING)
            for layer in (layer for layer in found if self.is_ours(layer)):
                found[layer] = max(0, min(found[layer], left))
                left -= found[layer]
        return found

    def _layer_nbytes(self, layer: CachedLayer, tokens: int, batch: int) -> int:
        rest = batch * (layer.state_nbytes + tokens * layer.index_nbytes)
        if layer.shape is None:
            return rest
        if not self.is_ours(layer):
            return rest + kv_nbytes([layer.shape], tokens, batch, dtype=self.dtype)
        settings = dict(self.settings)
        if isinstance(retain := settings.get("retain"), Importance) and parse_budget(retain.budget)[0] == "bytes":
            settings["retain"] = replace(retain, budget=NO_BUDGET)  # it is of the whole cache: see above
        if layer.shape.window is not None:
            settings["retain"] = Window(layer.shape.window, sinks=0)
        return rest + kv_nbytes([replace(layer.shape, window=None)], tokens, batch, dtype=self.dtype, **settings)

    def _token_nbytes(self, layer: CachedLayer) -> float:
        if layer.shape is None:
            return layer.index_nbytes
        ours = self.settings if self.is_ours(layer) else {}
        each = sealed_token_nbytes(
            layer.shape,
            keys=ours.get("keys", "exact"),
            values=ours.get("values", "exact"),
            dtype=self.dtype,
            block_size=int(ours.get("block_size", DEFAULT_BLOCK_SIZE)),
        )
        exact = layer.shape.heads * (layer.shape.key_dim + layer.shape.value_dim) * self.dtype.itemsize
        return layer.index_nbytes + (each if ours else exact)

    def _heads(self, layer: CachedLayer) -> str:
        if layer.shape is None:
            return ""
        if self.anatomy.latent_width == layer.shape.key_dim:
            return "latent (MLA)"
        queries = self.anatomy.query_heads
        name = "multi-query" if layer.shape.heads == 1 < queries else "grouped-query"
        return "multi-head" if layer.shape.heads == queries else name

    def __str__(self) -> str:
        """The settings in words."""
        parts = [f"keys {self.settings.get('keys', 'exact')}, values {self.settings.get('values', 'exact')}"]
        parts += [f"exact ones {str(self.dtype).removeprefix('torch.')}"]
        retain = self.settings.get("retain")
        parts += [f"kept by {retain}"] if retain else []
        return ", ".join(parts + (["its summary not counted"] if getattr(retain, "summary", 0) else []))


def _kind(layer: CachedLayer) -> str:
    if layer.shape is None:
        return "state" if layer.state_nbytes else "none"
    kind = "full" if layer.shape.window is None else f"sliding {layer.shape.window:,}"
    return kind + (" with an index" if layer.index_nbytes else "") + (" and a state" if layer.state_nbytes else "")
