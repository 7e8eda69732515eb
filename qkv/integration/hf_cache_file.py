"""A KVCache as one safetensors file: plain tensors, and its settings as JSON in the header."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from qkv.cache.codec import Codec
from qkv.cache.retention import RETENTIONS, KeepAll, Retention
from qkv.cache.rotation import Rotation
from qkv.cache.settings import LayerSettings
from qkv.errors import QkvError
from qkv.integration.hf_layer import KVLayer

if TYPE_CHECKING:
    from qkv.integration.hf_cache import KVCache

FORMAT = "qkv-cache-1"
PLAIN = ("block_size", "residual", "byte_budget", "token_share", "offload")
"""Settings that are numbers."""


def save_cache(cache: KVCache, path: Path) -> None:
    """Write every layer: blocks encoded as they are, tails exact. ``path`` appears whole or not at all.

    Raises:
        QkvError: open tokens, or a layer with a state of another kind (linear attention).
    """
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        found, description = _save_layer(layer)
        layers.append(description)
        tensors |= {f"layer{index}.{name}": t.contiguous().clone() for name, t in found.items()}
    header = {"settings": settings_to_json(cache.settings), "layers": layers, "model": cache.model_key}
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        save_file(tensors, unfinished, metadata={"format": "pt", "qkv_cache": FORMAT, "qkv": json.dumps(header)})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_cache(path: Path, device: str | torch.device = "cpu") -> KVCache:
    """Read a file of :func:`save_cache` onto ``device``.

    Raises:
        QkvError: a missing or damaged file, or one of another kind.
    """
    header, tensors = _read(path, device)
    from qkv.integration.hf_cache import KVCache

    layers = [_make_layer(description) for description in header["layers"]]
    cache = KVCache.from_layers(layers, settings_from_json(header["settings"]), header["model"])
    for index, (layer, description) in enumerate(zip(layers, header["layers"], strict=True)):
        prefix = f"layer{index}."
        own = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        _fill_layer(layer, description, own)
    return cache


def settings_to_json(settings: LayerSettings) -> dict[str, Any]:
    """Settings as plain values."""
    retain = settings.retain
    kind = next(name for name, known in RETENTIONS.items() if type(retain) is known)
    rotation = None if settings.rotation is None else asdict(settings.rotation)
    plain = {name: getattr(settings, name) for name in PLAIN}
    codecs = {"keys": str(settings.keys), "values": str(settings.values)}
    fields = asdict(retain)  # type: ignore[call-overload]
    return plain | codecs | {"retain": [kind, fields], "rotation": rotation}


def settings_from_json(saved: dict[str, Any]) -> LayerSettings:
    """Undo :func:`settings_to_json`."""
    kind, fields = saved["retain"]
    made: KeepAll = RETENTIONS[kind](**fields)
    retain: Retention = made
    rotation = saved["rotation"]
    return LayerSettings(
        keys=Codec.parse(saved["keys"]),
        values=Codec.parse(saved["values"]),
        retain=retain,
        rotation=None if rotation is None else Rotation(tuple(rotation["frequencies"]), *list(rotation.values())[1:]),
        **{name: saved[name] for name in PLAIN},
    )


def _save_layer(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if isinstance(layer, KVLayer):
        tensors, metadata = layer.core.state()
        return tensors, {
            "kind": "blocks",
            "window": layer.window,
            "state": metadata,
            "settings": settings_to_json(layer.core.settings),
        }
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise QkvError(f"a layer of kind {type(layer).__name__} cannot be saved")
    tensors = {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
    window = getattr(layer, "sliding_window", None)
    return tensors, {"kind": "stock", "window": window, "seen": layer.get_seq_length()}


def _make_layer(description: dict[str, Any]) -> Any:
    window = description["window"]
    if description["kind"] == "blocks":
        return KVLayer(settings_from_json(description["settings"]), window=window)
    return DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)


def _fill_layer(layer: Any, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if isinstance(layer, KVLayer):
        layer.core.load_state(tensors, description["state"])
        if "tail.keys" in tensors:
            layer.lazy_initialization(tensors["tail.keys"], tensors["tail.values"])
    elif tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
        if layer.is_sliding:
            layer.cumulative_length = description["seen"]


def _read(path: Path, device: str | torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise QkvError(f"{path} is not a file; save a cache there first")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("qkv_cache") != FORMAT:
                raise QkvError(f"{path} is not a saved cache of this version ({FORMAT})")
            return json.loads(metadata["qkv"]), {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise QkvError(f"{path} is damaged: {error}") from error
