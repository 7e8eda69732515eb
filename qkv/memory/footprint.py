"""Memory, told truthfully: of a live model from its storages, of a directory from its headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv.checkpoint.read import read_items
from qkv.dtypes import dtype_named
from qkv.integration.select import memory_key
from qkv.memory.items import Footprint, Item, unquantized
from qkv.memory.kv import kv_footprint
from qkv.quantizers.holder import Holder


def footprint(
    model: nn.Module | str | Path,
    *,
    context: int | None = None,
    batch: int = 1,
    kv_dtype: str | None = None,
    **cache: Any,
) -> Footprint:
    """What a model takes in memory.

    Args:
        model: a live model (its storages are added up; meta tensors count what they would take) or the
            path of a checkpoint (its headers are read, no weight is).
        context: tokens for which to add the key-value cache; None leaves it out.
        batch: sequences of that many tokens.
        kv_dtype: dtype of exact keys and values, ``"bfloat16"`` say; that of the model by default.
        **cache: ``keys``, ``values`` and ``retain`` of a :class:`qkv.KVCache`; without them, transformers' own.

    Raises:
        CheckpointError: a directory that is damaged, unsafe, or quantized by something else.
    """
    if isinstance(model, nn.Module):
        items, others = live_items(model)
        config: Any = getattr(model, "config", None)
        config = config.to_dict() if hasattr(config, "to_dict") else config
        floats = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
        dtype = next(floats, torch.bfloat16)
    else:
        items, config, dtype = read_items(Path(model), require_weights=context is None)
        others = {}
    kv: dict[str, Any] = {}
    if context is not None:
        kv_type = dtype_named(kv_dtype) if kv_dtype else dtype
        kv["kv_nbytes"], kv["kv_note"] = kv_footprint(config, context, batch, kv_type, cache)
    return Footprint.of(items, unquantized(items), **others, **kv)


def live_items(model: nn.Module) -> tuple[list[Item], dict[str, int]]:
    """The weights of a live model, tied ones once, and the bytes of what else its storages hold."""
    seen: set[tuple[int, ...]] = set()
    items = []
    for prefix, module in model.named_modules():
        for name, tensors in _weights(module):
            if _claim(tensors[0], seen):
                items.append(_live_item(f"{prefix}.{name}".lstrip("."), name, module, tensors))
                seen.update(memory_key(tensor) for tensor in tensors)
    buffer_nbytes = sum(buffer.nbytes for buffer in model.buffers() if _claim(buffer, seen))
    storages = {_storage_key(t): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    unused = sum(storages.values()) - sum(item.nbytes for item in items) - buffer_nbytes
    packed = sum(module.packed_nbytes for module in model.modules() if isinstance(module, Holder))
    return items, {"buffer_nbytes": buffer_nbytes, "unused_nbytes": max(unused, 0), "packed_nbytes": packed}


def _weights(module: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """A module's own weights by name, each with all the tensors that make it up, the codes first."""
    if isinstance(module, Holder):
        for name, spec in module.specs.items():
            buffers = [module._buffers[name + suffix] for suffix in spec.format.layout(spec.shape)]
            yield name, [buffer for buffer in buffers if buffer is not None]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, [parameter]


def _live_item(full_name: str, name: str, module: nn.Module, tensors: list[Tensor]) -> Item:
    first, nbytes = tensors[0], sum(tensor.nbytes for tensor in tensors)
    if isinstance(module, Holder) and name in module.specs:
        spec = module.specs[name]
        return Item(full_name, str(spec.format), first.dtype, spec.shape, nbytes, nbytes - first.nbytes)
    return Item(full_name, None, first.dtype, tuple(first.shape), nbytes)


def _claim(tensor: Tensor, seen: set[tuple[int, ...]]) -> bool:
    """Whether the tensor's memory was not counted before; it is now."""
    key = memory_key(tensor)
    fresh = key not in seen
    seen.add(key)
    return fresh


def _storage_key(tensor: Tensor) -> tuple[int, ...]:
    if tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    return (tensor.untyped_storage().data_ptr(), 0)
