"""What a layer lends to other caches, and takes from them: blocks by reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from qkv.cache.blocks import Block, BlockStore
from qkv.cache.codec import Codec
from qkv.cache.row import Row
from qkv.cache.sealing import to_blocks
from qkv.cache.tail import Tail
from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer


def shareable_tokens(layer: CacheLayer, index: int) -> int:
    """Tokens of a row, from its first, that were computed with nothing hidden and are all still held."""
    row, size = layer.rows[index], layer.settings.block_size
    whole = 0
    while whole < len(row.blocks) and row.blocks[whole].start == whole * size:
        whole += 1
    held = layer.row_length(row) if row.sealed == whole * size else whole * size
    return held if row.pure is None else min(row.pure, held)


def shareable_block(layer: CacheLayer, index: int, number: int) -> Block:
    """Block ``number`` of a row, with a reference for the caller; one still in the tail is encoded now."""
    row, size = layer.rows[index], layer.settings.block_size
    if number < len(row.blocks):
        block = row.blocks[number]
        return block.store.share(block)
    assert layer.tail is not None and layer.store is not None
    first = layer.first_column(row) + number * size - row.sealed
    keys, values = (t[index, :, first : first + size] for t in (layer.tail.keys, layer.tail.values))
    return layer.store.put(to_blocks(keys, size), to_blocks(values, size), [number * size])[0]


def shareable_sinks(layer: CacheLayer, index: int) -> list[Block]:
    """The row's exact sinks, with a reference for the caller; none where the policy has none."""
    row, wanted = layer.rows[index], layer.settings.retain.sinks
    if not wanted:
        return []
    if row.sinks is not None and row.sinks.num_tokens == wanted:
        return [row.sinks.store.share(row.sinks)]
    assert layer.tail is not None
    first = layer.first_column(row) - row.sealed
    keys, values = (t[None, index, :, first : first + wanted] for t in (layer.tail.keys, layer.tail.values))
    return layer.exact_store().put(keys, values, [0])


def adopt(layer: CacheLayer, blocks: Sequence[Block], sinks: Block | None) -> None:
    """Fill an empty layer with one row that begins with these blocks; they are referred to, not copied."""
    if layer.seen or not blocks:
        raise QkvError("blocks are adopted by an empty layer, at least one of them")
    layer.store = blocks[0].store
    layout = layer.store.layout
    exact = Codec("exact")
    layer._exact = layer._exact or BlockStore(replace(layout, keys=exact, values=exact))
    row = Row(sealed=blocks[-1].end, blocks=[block.store.share(block) for block in blocks])
    if sinks is not None:
        row.sinks = sinks.store.share(sinks)
    layer.rows, layer.seen = [row], row.sealed
    device = next(iter(blocks[0].slab.tensors.values())).device
    keys = torch.empty(1, layout.heads, 0, layout.key_dim, dtype=layout.dtype, device=device)
    layer.tail = Tail(keys, keys.new_empty(1, layout.heads, 0, layout.value_dim))
    layer.settings.retain.check(layer)
    layer.settings.retain.settle(row, layer)
