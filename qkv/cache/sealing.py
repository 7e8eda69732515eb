"""Sealing: full blocks that the residual window has left behind are encoded, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv.cache.row import Row

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer


def seal(layer: CacheLayer, index: int, row: Row) -> None:
    """Encode every full block that the residual window has left behind."""
    assert layer.tail is not None and layer.store is not None
    size = layer.settings.block_size
    count = (layer.row_length(row) - row.sealed - layer.settings.residual) // size
    while count > 0:
        part = min(count, layer.store.slab_blocks)
        first = layer.first_column(row)
        columns = slice(first, first + part * size)
        keys, values = layer.tail.keys[index, :, columns], layer.tail.values[index, :, columns]
        _keep_sinks(layer, row, keys, values)
        starts = range(row.sealed, row.sealed + part * size, size)
        row.blocks += layer.store.put(to_blocks(keys, size), to_blocks(values, size), starts)
        row.sealed += part * size
        count -= part


def _keep_sinks(layer: CacheLayer, row: Row, keys: Tensor, values: Tensor) -> None:
    """Sinks leaving the tail stay exact, in a block of their own."""
    have = row.num_hidden
    missing = min(layer.settings.retain.sinks, row.sealed + keys.shape[1]) - have
    if missing <= 0 or row.sealed > have:
        return
    keys, values = keys[None, :, :missing], values[None, :, :missing]
    old = row.sinks
    if old is not None:
        old_keys, old_values = old.store.decode(old)
        keys, values = torch.cat((old_keys[None], keys), 2), torch.cat((old_values[None], values), 2)
    row.sinks = layer.exact_store().put(keys, values, [0])[0]
    if old is not None:
        old.store.drop(old)


def trim(layer: CacheLayer) -> None:
    assert layer.tail is not None
    first = min(min(layer.first_column(row), layer.tail.columns) for row in layer.rows)
    layer.tail.trim(layer.tail.columns - max(first, 0))


def to_blocks(x: Tensor, size: int) -> Tensor:
    """``[heads, tokens, dim]`` to ``[blocks, heads, size, dim]``."""
    return torch.unflatten(x, 1, (-1, size)).transpose(0, 1)
