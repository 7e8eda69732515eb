"""Bytes of a key-value cache by a model's config alone; a cache it does not understand is said, not guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qkv.cache.plan import LayerShape, kv_nbytes

ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
STATEFUL_WORDS = ("mamba", "rwkv", "ssm", "recurrent", "retnet", "linear_attn", "xlstm")


def kv_footprint(
    config: Any, context: int, batch: int, dtype: torch.dtype, settings: Mapping[str, Any]
) -> tuple[int | None, str]:
    """Bytes that a cache holds after ``context`` tokens, and a note on the figure.

    Args:
        config: ``config.json`` as a mapping; nested ``text_config`` is looked into.
        context: tokens of each sequence.
        batch: sequences.
        dtype: of keys and values that are stored exactly.
        settings: ``keys``, ``values`` and ``retain`` of a :class:`qkv.KVCache`; empty for transformers' own.
    """
    shapes = layer_shapes(config)
    if isinstance(shapes, str):
        return None, f"KV cache: not known for this model ({shapes})"
    nbytes = kv_nbytes(shapes, context, batch, dtype=dtype, **settings)
    retain = settings.get("retain")
    parts = [f"KV cache of {batch} x {context:,} tokens", f"keys {settings.get('keys', 'exact')}"]
    parts += [f"values {settings.get('values', 'exact')}", f"exact ones {str(dtype).removeprefix('torch.')}"]
    return nbytes, ", ".join(parts + ([f"kept by {retain}"] if retain else []))


def layer_shapes(config: Any) -> list[LayerShape] | str:
    """What each layer that keeps keys and values of its own caches a token; or why that is not known."""
    if not isinstance(config, Mapping):
        return "it has no config"
    nested = config.get("text_config")
    config = nested if isinstance(nested, Mapping) else config
    reason = _not_understood(config)
    if reason:
        return reason
    config = _with_layer_types(config)
    heads, key_dim, value_dim = _heads_and_widths(config)
    return [LayerShape(heads, key_dim, value_dim, _window(config, kind)) for kind in _layers(config)]


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _not_understood(config: Mapping[str, Any]) -> str:
    if config.get("is_encoder_decoder"):
        return "encoder and decoder"
    if _first(config, "num_hidden_layers", "n_layer", "num_layers") is None:
        return "its config names no number of layers"
    if _first(config, "num_attention_heads", "n_head") is None:
        return "its config names no attention heads"
    odd = {str(kind) for kind in config.get("layer_types") or () if kind not in ATTENDING}
    if odd:
        return f"layers of type {', '.join(sorted(odd))}"
    states = [key for key in config if any(word in key.lower() for word in STATEFUL_WORDS) and config[key]]
    return f"it has {states[0]}" if states else ""


def _with_layer_types(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ask transformers which layers slide where the config alone leaves it open."""
    window = config.get("sliding_window")
    if not window or config.get("layer_types") or config.get("use_sliding_window") is False:
        return config
    try:
        from transformers import AutoConfig

        full = AutoConfig.for_model(**config).to_dict()
    except Exception:  # a model that transformers does not know: a window then holds for every layer
        return config
    return {**config, "layer_types": full.get("layer_types"), "sliding_window": full.get("sliding_window")}


def _layers(config: Mapping[str, Any]) -> list[str]:
    """Kinds of the layers that keep keys and values of their own."""
    count = int(_first(config, "num_hidden_layers", "n_layer", "num_layers"))
    slides = bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
    default = "sliding_attention" if slides else "full_attention"
    kinds = list(config.get("layer_types") or [default] * count)[:count]
    shared = int(config.get("num_kv_shared_layers") or 0)
    return kinds[: len(kinds) - shared]


def _window(config: Mapping[str, Any], kind: str) -> int | None:
    name = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind)
    window = config.get(name) if name else None
    return int(window) if window else None


def _heads_and_widths(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Key-value heads, and numbers of a key and of a value of one; latent attention caches one narrow head."""
    if config.get("kv_lora_rank"):
        return 1, int(config["kv_lora_rank"]), int(config.get("qk_rope_head_dim") or 0)
    heads = int(_first(config, "num_attention_heads", "n_head"))
    kv_heads = _first(config, "num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query") else heads
    head_dim = int(_first(config, "head_dim") or int(_first(config, "hidden_size", "n_embd")) // heads)
    return int(kv_heads), head_dim, head_dim
