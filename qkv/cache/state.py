"""A layer's contents as plain tensors and plain metadata, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.cache.blocks import Block, BlockLayout, BlockStore
from qkv.cache.codec import Codec
from qkv.cache.row import Row
from qkv.cache.tail import Tail
from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer

_APART = ("sinks", "summary")
_OPTIONAL = ("summary_weights", "mass", "focus")


def layer_state(layer: CacheLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name and JSON metadata of a layer without open tokens; a shared block is written once."""
    if layer.num_open:
        raise QkvError(f"{layer.num_open} tokens are still open; commit or discard them before saving")
    if layer.tail is None or layer.store is None:
        return {}, {"seen": layer.seen}
    blocks = list({id(block): block for row in layer.rows for block in row.blocks}.values())
    number = {id(block): i for i, block in enumerate(blocks)}
    tensors = {"tail.keys": layer.tail.keys, "tail.values": layer.tail.values}
    for name in layer.store.layout.tensors():
        if blocks:
            tensors[f"blocks.{name}"] = torch.cat([block.tensors()[name] for block in blocks])
    rows = []
    for index, row in enumerate(layer.rows):
        rows.append(_row_metadata(row, [number[id(block)] for block in row.blocks]))
        tensors |= {f"row{index}.{name}": t for name, t in _row_tensors(row).items()}
        queries = layer.observations.queries(index)
        if queries is not None:
            tensors[f"row{index}.queries"] = queries
    starts = [block.start for block in blocks]
    return tensors, {"seen": layer.seen, "rows": rows, "starts": starts}


def load_layer_state(layer: CacheLayer, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Fill an empty layer with what :func:`layer_state` returned."""
    if layer.seen:
        raise QkvError("a state is loaded into an empty layer; reset it first")
    if "tail.keys" not in tensors:
        return
    keys, values = tensors["tail.keys"], tensors["tail.values"]
    settings, exact = layer.settings, Codec("exact")
    shape = (keys.shape[1], keys.shape[3], values.shape[3], settings.block_size)
    layout = BlockLayout(*shape, settings.keys, settings.values, keys.dtype)
    layer.store = layer.store or BlockStore(layout, offload=settings.offload)
    layer._exact = layer._exact or BlockStore(BlockLayout(*shape, exact, exact, keys.dtype))
    blocks = _load_blocks(layer.store, tensors, metadata["starts"])
    layer.tail, layer.seen = Tail(keys, values), metadata["seen"]
    layer.rows = [_load_row(layer, i, saved, blocks, tensors) for i, saved in enumerate(metadata["rows"])]
    for block in blocks:
        layer.store.drop(block)
    layer.observations.load_queries([tensors.get(f"row{i}.queries") for i in range(layer.batch)])
    settings.retain.check(layer)


def _row_metadata(row: Row, blocks: list[int]) -> dict[str, Any]:
    return {
        "start": row.start,
        "sealed": row.sealed,
        "blocks": blocks,
        "dropped": row.dropped,
        "pure": row.pure,
        "summary_positions": list(row.summary_positions),
    }


def _row_tensors(row: Row) -> dict[str, Tensor]:
    found = {name: tensor for name in _OPTIONAL if (tensor := getattr(row, name)) is not None}
    for name in _APART:
        block: Block | None = getattr(row, name)
        if block is not None:
            keys, values = block.store.decode(block)
            found |= {f"{name}.keys": keys.contiguous(), f"{name}.values": values.contiguous()}
    return found


def _load_blocks(store: BlockStore, tensors: dict[str, Tensor], starts: list[int]) -> list[Block]:
    if not starts:
        return []
    encoded = {}
    for name, (shape, dtype) in store.layout.tensors().items():
        found = tensors.get(f"blocks.{name}")
        if found is None or found.dtype != dtype or tuple(found.shape) != (len(starts), *shape):
            raise QkvError(f"saved blocks do not fit the settings: {name} should be {dtype} {(len(starts), *shape)}")
        encoded[name] = found
    return store.put_encoded(encoded, starts)


def _load_row(
    layer: CacheLayer, index: int, saved: dict[str, Any], blocks: list[Block], tensors: dict[str, Tensor]
) -> Row:
    row = Row(start=saved["start"], sealed=saved["sealed"], dropped=saved["dropped"], pure=saved["pure"])
    row.blocks = [block.store.share(block) for block in (blocks[i] for i in saved["blocks"])]
    row.summary_positions = tuple(saved["summary_positions"])
    for name in _OPTIONAL:
        setattr(row, name, tensors.get(f"row{index}.{name}"))
    for name in _APART:
        keys = tensors.get(f"row{index}.{name}.keys")
        if keys is not None:
            start = row.summary_positions[0] if name == "summary" else 0
            values = tensors[f"row{index}.{name}.values"]
            setattr(row, name, layer.exact_store().put(keys[None], values[None], [start])[0])
    return row
