"""Squeezing a block into a few representatives: values merged by attention, one key kept for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv.cache.row import Row

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer

TOKENS_EACH = 4


def merge_block(row: Row, layer: CacheLayer, limit: int) -> None:
    """Add the row's oldest block to its summary of at most ``limit`` tokens; the block itself stays."""
    block = row.blocks[0]
    keys, values = block.store.decode(block)
    first = max(row.num_hidden - block.start, 0)
    if first >= block.num_tokens:
        return
    keys, values = keys[:, first:], values[:, first:]
    weights = attention_weights(layer.observed_queries(row), keys)
    positions = torch.arange(block.start + first, block.end)
    merged = _pool(keys, values, weights, positions, TOKENS_EACH)
    if row.summary is not None and row.summary_weights is not None:
        old_keys, old_values = row.summary.store.decode(row.summary)
        old = (old_keys, old_values, row.summary_weights, torch.tensor(row.summary_positions))
        merged = _join(_shrink(old, limit - merged[0].shape[1]), merged)
    merged = _shrink(merged, limit)
    _replace(row, layer, merged)


def attention_weights(queries: Tensor | None, keys: Tensor) -> Tensor:
    """Mean attention, ``float32 [tokens]``, that observed queries ``[heads, group, n, dim]`` pay to ``keys``
    ``[heads, tokens, dim]``; all equal where no query was observed."""
    if queries is None or queries.shape[2] == 0:
        return torch.full((keys.shape[1],), 1.0 / keys.shape[1], device=keys.device)
    scores = torch.einsum("hgnd,htd->hgnt", queries.float(), keys.float())
    return scores.softmax(-1).mean((0, 1, 2))


Merged = tuple[Tensor, Tensor, Tensor, Tensor]


def _pool(keys: Tensor, values: Tensor, weights: Tensor, positions: Tensor, each: int) -> Merged:
    """Every ``each`` neighbours become one; a short last group is a smaller one."""
    parts = [slice(i, i + each) for i in range(0, keys.shape[1], each)]
    heaviest = [p.start + int(weights[p].argmax()) for p in parts]
    total = torch.stack([weights[p].sum() for p in parts])
    blended = [(values[:, p].float() * weights[p, None]).sum(1) / weights[p].sum() for p in parts]
    return keys[:, heaviest], torch.stack(blended, 1).to(values.dtype), total, positions[heaviest]


def _shrink(merged: Merged, limit: int) -> Merged:
    """Merge the oldest pairs until at most ``max(limit, 1)`` are left."""
    while merged[0].shape[1] > max(limit, 1):
        excess = min(merged[0].shape[1] - max(limit, 1), merged[0].shape[1] // 2)
        old, new = _part(merged, slice(0, 2 * excess)), _part(merged, slice(2 * excess, None))
        merged = _join(_pool(*old, 2), new)
    return merged


def _part(merged: Merged, tokens: slice) -> Merged:
    keys, values, weights, positions = merged
    return keys[:, tokens], values[:, tokens], weights[tokens], positions[tokens]


def _join(old: Merged, new: Merged) -> Merged:
    keys, values = torch.cat((old[0], new[0]), 1), torch.cat((old[1], new[1]), 1)
    return keys, values, torch.cat((old[2], new[2])), torch.cat((old[3], new[3]))


def _replace(row: Row, layer: CacheLayer, merged: Merged) -> None:
    keys, values, weights, positions = merged
    old = row.summary
    row.summary = layer.exact_store().put(keys[None], values[None], [int(positions[0])])[0]
    row.summary_positions = tuple(positions.tolist())
    row.summary_weights = weights
    if old is not None:
        old.store.drop(old)
