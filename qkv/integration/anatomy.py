"""What a model keeps of its context and how wide it is: asked of the model itself, built without weights.

The model is built from its ``config.json`` on the meta device, which takes no memory, and fed a few tokens with
transformers' own cache; what each layer of the cache then holds says what the layer keeps. So there is no table
of architectures here that could be out of date. Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from qkv.cache.plan import LayerShape
from qkv.errors import QkvError
from qkv.integration.compat import cache_argument, stock_layers

FULL: Final = "DynamicLayer"
SLIDING: Final = "DynamicSlidingWindowLayer"
PER_TOKEN: Final = {FULL, SLIDING, "DynamicIndexedLayer"}
STATE: Final = {"LinearAttentionLayer"}
BOTH: Final = {"LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
NOTHING: Final = {"DummyLayer"}
"""Layers of transformers' cache by what they hold: keys and values, a state of one size, both, or nothing."""
STATEFUL_WORDS: Final = ("mamba", "rwkv", "ssm", "recurrent", "retnet", "linear_attn", "xlstm")
BATCH, TOKENS = 2, 7
"""What the model is fed: sizes that no dimension of a model is likely to have, so that they are seen."""


class UnknownCacheError(QkvError):
    """A model whose cache is not understood, and why."""


@dataclass(frozen=True)
class CachedLayer:
    """What one layer keeps of one sequence.

    Attributes:
        source: transformers' class for it.
        shape: of its keys and values a token; None where it keeps none.
        index_nbytes: what sparse attention keeps a token to choose by, beside keys and values.
        state_nbytes: the state of a recurrence or convolution, the same size for any context.
    """

    source: str
    shape: LayerShape | None = None
    index_nbytes: int = 0
    state_nbytes: int = 0


@dataclass(frozen=True)
class Anatomy:
    """Sizes of a model that the memory of a step depends on.

    Attributes:
        layers: what each layer keeps, in order.
        query_heads: attention heads that ask.
        hidden, widest, vocab: numbers a token takes between layers, in the widest product inside one, and as logits.
        latent_width: of the latent that latent attention keeps in place of keys and values; 0 for other models.
        expanded: numbers of keys and values a token takes while attention reads them; latent ones are expanded.
        attention: transformers' implementation, ``"sdpa"`` or ``"eager"``.
        last_logits_only: whether ``generate`` can ask for the logits of the last token alone.
        trained_context: positions the model was made for, where its config says so.
    """

    layers: tuple[CachedLayer, ...]
    query_heads: int
    hidden: int
    widest: int
    vocab: int
    latent_width: int
    expanded: int
    attention: str
    last_logits_only: bool
    trained_context: int | None


def anatomy(config: Any, dtype: torch.dtype) -> Anatomy:
    """Ask the model that ``config`` describes.

    Args:
        config: ``config.json`` as a mapping; of a model with several parts, its text decoder is looked at.
        dtype: of the model.

    Raises:
        UnknownCacheError: saying why it is not known, for a model that transformers does not know or cannot run without
            weights, an encoder-decoder, or a cache that is not one of the kinds above.
    """
    if not isinstance(config, Mapping) or not config:
        raise UnknownCacheError("it has no config")
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    found = _ask(json.dumps(plain, sort_keys=True, default=str), dtype)
    if isinstance(found, str):
        raise UnknownCacheError(found)
    return found


@lru_cache(maxsize=32)
def _ask(config_json: str, dtype: torch.dtype) -> Anatomy | str:
    """The anatomy, or why there is none; remembered, because a model is asked about more than once."""
    config = json.loads(config_json)
    if config.get("is_encoder_decoder"):
        return "encoder and decoder: what it keeps depends on the encoder's input too"
    if not config.get("model_type"):
        return "its config names no model_type"
    try:
        model, layers = _run_once(config, dtype)
        cached = tuple(_cached(layer) for layer in layers)
        _check_states(config, cached)
        return _measured(model, cached)
    except UnknownCacheError as error:
        return str(error)
    except Exception as error:  # transformers raises anything for a model that it cannot build or run
        return f"transformers cannot run {config['model_type']} without weights: {_first_line(error)}"


def _run_once(config: dict[str, Any], dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """The text decoder on the meta device, and the layers of its cache after a few tokens."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        name = str(config["model_type"])
        kind = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else None
        whole: Any = AutoConfig.for_model(**{key: value for key, value in config.items() if not _is_told(kind, key)})
        if whole.is_encoder_decoder:
            raise UnknownCacheError("encoder and decoder: what it keeps depends on the encoder's input too")
        decoder = whole.get_text_config(decoder=True)
        decoder._experts_implementation = "batched_mm"  # the one that asks no data which expert is needed
        known = type(decoder) in AutoModelForCausalLM._model_mapping
        with torch.device("meta"):
            model = (AutoModelForCausalLM if known else AutoModel).from_config(decoder, dtype=dtype).eval()
        model.config.pad_token_id = None  # else some models look for padding, and here are no ids to look at
        cache: Any = DynamicCache(config=decoder)
        if [type(layer) for layer in cache.layers] != [type(layer) for layer in stock_layers(decoder)]:
            raise UnknownCacheError("its cache changes from call to call")
        ids = torch.zeros((BATCH, TOKENS), dtype=torch.long, device="meta")
        model(ids, use_cache=True, **{cache_argument(model): cache})
    return model, list(cache.layers)


def _is_told(kind: Any, key: str) -> bool:
    """Whether a config's class works this entry out itself and takes no other value for it."""
    found = getattr(kind, key, None)
    return isinstance(found, property) and found.fset is None


def _cached(layer: Any) -> CachedLayer:
    name = type(layer).__name__
    if name in NOTHING:
        return CachedLayer(name)
    if name not in PER_TOKEN | STATE | BOTH:
        raise UnknownCacheError(f"its cache has layers of type {name}")
    tensors = dict(_tensors(layer))
    if not tensors:
        raise UnknownCacheError(f"a layer of type {name} stays empty: the model keeps its state elsewhere")
    shape = None if name in STATE else _shape(layer, name, tensors)
    index = tensors.pop("indexer_keys", None)
    if index is not None and tuple(index.shape[:2]) != (BATCH, TOKENS):
        raise UnknownCacheError(f"a layer of type {name} keeps an index of shape {list(index.shape)}")
    states = [tensor for key, tensor in tensors.items() if key not in ("keys", "values")]
    if any(tensor.dim() == 0 or tensor.shape[0] != BATCH for tensor in states):
        raise UnknownCacheError(f"a layer of type {name} keeps a state that is not one a sequence")
    state_nbytes = sum(tensor.nbytes for tensor in states) // BATCH
    return CachedLayer(name, shape, 0 if index is None else index.nbytes // (BATCH * TOKENS), state_nbytes)


def _tensors(layer: Any) -> list[tuple[str, Tensor]]:
    """What a cache layer holds, by name; a window's own counter is no part of it."""
    found = []
    for name, value in vars(layer).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        found += [(f"{name}{key}", t) for key, t in parts if isinstance(t, Tensor) and name != "_sliding_window_tensor"]
    return found


def _shape(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> LayerShape:
    window = getattr(layer, "sliding_window", None)
    held = TOKENS if window is None else min(TOKENS, window - 1)
    keys, values = tensors.get("keys"), tensors.get("values")
    if keys is None or values is None or keys.dim() != 4 or values.dim() != 4:
        raise UnknownCacheError(f"a layer of type {name} keeps no keys and values a head and token")
    if {tuple(t.shape[:1] + t.shape[2:3]) for t in (keys, values)} != {(BATCH, held)}:
        raise UnknownCacheError(f"a layer of type {name} keeps {keys.shape[2]} tokens of {TOKENS}")
    if keys.shape[1] != values.shape[1]:
        raise UnknownCacheError(f"a layer of type {name} keeps {keys.shape[1]} and {values.shape[1]} heads")
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], window)


def _check_states(config: Mapping[str, Any], layers: tuple[CachedLayer, ...]) -> None:
    """A config that speaks of states, and a cache without any, do not fit together."""
    named = [key for key in config if any(word in key.lower() for word in STATEFUL_WORDS) and config[key]]
    if named and not any(layer.state_nbytes for layer in layers):
        raise UnknownCacheError(f"its config has {named[0]} and its cache no state")


def _measured(model: Any, layers: tuple[CachedLayer, ...]) -> Anatomy:
    config = model.config
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    inner = [p for m in model.modules() if m is not table and m is not head for p in m._parameters.values()]
    widths = [_width(parameter, config) for parameter in inner if parameter is not None and parameter.dim() > 1]
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    shapes = [layer.shape for layer in layers if layer.shape is not None]
    return Anatomy(
        layers=layers,
        query_heads=heads,
        hidden=int(table.weight.shape[1]),
        widest=max(widths, default=int(table.weight.shape[1])),
        vocab=0 if head is None else int(head.weight.shape[0]),
        latent_width=int(getattr(config, "kv_lora_rank", None) or 0),
        expanded=max((_expanded(config, shape, heads) for shape in shapes), default=0),
        attention=str(config._attn_implementation),
        last_logits_only="logits_to_keep" in inspect.signature(type(model).forward).parameters,
        trained_context=getattr(config, "max_position_embeddings", None),
    )


def _width(parameter: nn.Parameter, config: Any) -> int:
    """Numbers a token takes on the wider side of a product; a token goes to several experts."""
    if parameter.dim() < 3:
        return int(max(parameter.shape))
    chosen = next((n for name in ("num_experts_per_tok", "top_k_experts") if (n := getattr(config, name, None))), 1)
    return int(chosen) * int(max(parameter.shape[1:]))


def _expanded(config: Any, shape: LayerShape, heads: int) -> int:
    if getattr(config, "kv_lora_rank", None) == shape.key_dim:
        return heads * int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return max(heads, shape.heads) * (shape.key_dim + shape.value_dim)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
