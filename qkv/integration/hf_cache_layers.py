"""Which layer of a model's cache is ours and which stays transformers', and what both can be asked."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from qkv.cache.retention import Masked, Window
from qkv.cache.settings import LayerSettings
from qkv.errors import QkvError
from qkv.integration.compat import stock_layers
from qkv.integration.hf_layer import KVLayer


def make_layers(config: Any, settings: LayerSettings, shareable: bool) -> list[Any]:
    """A layer for each of the model's: blocks for full attention, transformers' own for sliding windows.

    Raises:
        QkvError: a model none of whose layers can be held in blocks.
    """
    stock = stock_layers(config)
    only_sliding = not any(type(layer) is DynamicLayer for layer in stock)
    layers = [_make_layer(layer, settings, shareable, only_sliding) for layer in stock]
    if not any(isinstance(layer, KVLayer) for layer in layers):
        names = ", ".join(sorted({type(layer).__name__ for layer in stock}))
        raise QkvError(f"{config.model_type} has no attention layer that can be held in blocks, only {names}")
    return layers


def _make_layer(stock: Any, settings: LayerSettings, shareable: bool, only_sliding: bool) -> Any:
    if type(stock) is DynamicLayer:
        return KVLayer(settings)
    if type(stock) is not DynamicSlidingWindowLayer or not (shareable or only_sliding):
        return stock
    window = stock.sliding_window
    retain = Masked(window) if shareable else Window(window, sinks=0)
    return KVLayer(replace(settings, retain=retain), window=window)


def check_rotation(settings: LayerSettings) -> None:
    """Raise QkvError where sinks are to be turned and the model's keys cannot be."""
    retain = settings.retain
    if isinstance(retain, Window) and retain.rerotate and (settings.rotation is None or settings.rotation.refused):
        why = "it has no rotary positions" if settings.rotation is None else settings.rotation.refused
        raise QkvError(f"Window(rerotate=True) cannot turn this model's keys: {why}; use rerotate=False")


def model_key(config: Any) -> str:
    """What tells two models apart that share no blocks."""
    found = config.to_dict()
    found.pop("transformers_version", None)
    return f"{getattr(config, '_name_or_path', '')}|{json.dumps(found, sort_keys=True, default=str)}"


def fork_layer(layer: Any) -> Any:
    """An independent layer that holds the same."""
    if not isinstance(layer, KVLayer):
        return copy.deepcopy(layer)
    other = copy.copy(layer)
    other.core = layer.core.fork()
    return other


def is_fresh(layer: Any) -> bool:
    """Whether nothing was ever put into it."""
    return not getattr(layer, "is_initialized", True) or (
        isinstance(layer, KVLayer) and len(layer.core) == 0 and layer.core.num_open == 0
    )


def crop_layer(layer: Any, tokens_to_remove: int) -> None:
    """A stock window that is asked for all it ever saw is emptied: it could not be cropped that far."""
    if (
        not isinstance(layer, KVLayer)
        and hasattr(layer, "get_seq_length")
        and -tokens_to_remove >= layer.get_seq_length()
    ):
        layer.reset()
    elif not isinstance(layer, KVLayer) and tokens_to_remove == 0 and not getattr(layer, "record_past", True):
        return
    else:
        layer.crop(tokens_to_remove)


def stock_nbytes(layer: Any) -> int:
    """Bytes of the storages of one of transformers' layers."""
    held: dict[int, int] = {}
    for value in vars(layer).values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())
