"""What a cache will take, before it is made: the bytes of one layer's keys and values, and of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from qkv.cache.blocks import BlockLayout
from qkv.cache.codec import Codec
from qkv.cache.retention import Importance, KeepAll, Retention, Window
from qkv.cache.retention.sizes import parse_budget
from qkv.cache.settings import DEFAULT_BLOCK_SIZE, DEFAULT_RESIDUAL


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches a token; ``window`` is the model's own sliding window, if any."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


def kv_nbytes(
    layers: Sequence[LayerShape],
    tokens: int,
    batch: int = 1,
    *,
    keys: str | Codec = "exact",
    values: str | Codec = "exact",
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = DEFAULT_BLOCK_SIZE,
    residual: int = DEFAULT_RESIDUAL,
    retain: Retention | None = None,
) -> int:
    """Bytes that the keys and values of ``batch`` unpadded rows of ``tokens`` tokens take, once committed.

    Exact for :class:`KeepAll` and for :class:`Window` without a summary; for :class:`Importance` the most it
    holds. Layers with a window of the model's own hold ``window - 1`` exact tokens, as transformers does.
    """
    retain = retain or KeepAll()
    codecs = (Codec.parse(keys, "channel"), Codec.parse(values, "token"))
    total = 0
    for shape, count in Counter(layers).items():
        if shape.window is not None:
            held = min(tokens, shape.window - 1)
            total += count * batch * held * shape.heads * (shape.key_dim + shape.value_dim) * dtype.itemsize
            continue
        layout = BlockLayout(shape.heads, shape.key_dim, shape.value_dim, block_size, *codecs, dtype)
        total += count * batch * _row_nbytes(layout, tokens, residual, retain)
    kind, amount = parse_budget(retain.budget) if isinstance(retain, Importance) else ("tokens", 0.0)
    return min(total, int(amount)) if kind == "bytes" else total


def sealed_token_nbytes(
    shape: LayerShape, *, keys: str | Codec, values: str | Codec, dtype: torch.dtype, block_size: int
) -> float:
    """Bytes a token of one layer takes once its block is sealed, scales and positions included."""
    codecs = (Codec.parse(keys, "channel"), Codec.parse(values, "token"))
    return BlockLayout(shape.heads, shape.key_dim, shape.value_dim, block_size, *codecs, dtype).nbytes() / block_size


def _row_nbytes(layout: BlockLayout, tokens: int, residual: int, retain: Retention) -> int:
    sealed = max(0, (tokens - residual) // layout.block_size)
    tail = tokens - sealed * layout.block_size
    token_nbytes = layout.heads * (layout.key_dim + layout.value_dim) * layout.dtype.itemsize
    sinks = min(retain.sinks, sealed * layout.block_size)
    held = _held_blocks(layout.block_size, sealed, tail, tokens, sinks, retain)
    statistics = 8 * (held + ceil(tail / layout.block_size)) if retain.needs_mass else 0
    return held * layout.nbytes() + (tail + sinks) * token_nbytes + statistics


def _held_blocks(size: int, sealed: int, tail: int, tokens: int, sinks: int, retain: Retention) -> int:
    if isinstance(retain, Window):
        return sealed - min(sealed, max(0, tokens - retain.size + 1) // size)
    if not isinstance(retain, Importance):
        return sealed
    kind, amount = parse_budget(retain.budget)
    if kind == "bytes":
        return sealed
    limit = amount if kind == "tokens" else amount * tokens
    return max(0, min(sealed, int(limit - tail - sinks) // size))
