"""What the tensors of a directory stand for, quantized or not, read from its config and headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.layouts import LAYOUTS
from qkv.checkpoint.layouts.base import Layout, Stored
from qkv.checkpoint.source import Source
from qkv.dtypes import config_dtype
from qkv.errors import CheckpointError, shown
from qkv.memory.items import Item


def read_items(path: Path, *, require_weights: bool) -> tuple[list[Item], dict[str, Any], torch.dtype]:
    """Weights, config and float dtype of a directory for a footprint.

    Args:
        path: a model directory or a safetensors file.
        require_weights: whether a folder with nothing but a ``config.json`` is an error.
    """
    if not require_weights and path.is_dir() and not any(path.glob("*.safetensors*")):
        config = Source.config_of(path)
        return [], config, config_dtype(config)
    with Source.open(path) as source:
        items = [stored.item for stored in stored_weights(source)]
        return items, source.config, config_dtype(source.config)


def stored_weights(source: Source) -> list[Stored]:
    """The weights of a directory, float ones and those quantized in one of our ``LAYOUTS``.

    Raises:
        CheckpointError: quantized by something else, or tensors that do not fit their format.
    """
    layout = layout_of(source)
    if layout is None:
        return [Stored.plain(entry) for entry in source.entries.values()]
    return layout.stored(source, source.config["quantization_config"])


def layout_of(source: Source) -> Layout | None:
    """The layout that the config names; None for floats.

    Raises:
        CheckpointError: it names another.
    """
    config = source.config.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    found = next((layout for layout in LAYOUTS.values() if layout.method == method), None)
    if found is None or not isinstance(config, dict):
        known = ", ".join(layout.method for layout in LAYOUTS.values())
        raise CheckpointError(
            f"{source.path} is quantized with {shown(method)}, and what can be read here is {known}; use its float form"
        )
    return found
