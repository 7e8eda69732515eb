"""KVCache: a transformers cache made of our layers."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from qkv.cache.codec import Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.report import CacheReport, report_layers
from qkv.cache.retention import Importance, KeepAll, Retention
from qkv.cache.retention.sizes import parse_budget
from qkv.cache.rotation import Rotation
from qkv.cache.settings import DEFAULT_BLOCK_SIZE, DEFAULT_RESIDUAL, LayerSettings
from qkv.errors import QkvError
from qkv.integration import hf_attention
from qkv.integration.compat import rotary_angles
from qkv.integration.hf_cache_layers import (
    check_rotation,
    crop_layer,
    fork_layer,
    is_fresh,
    make_layers,
    model_key,
    stock_nbytes,
)
from qkv.integration.hf_layer import KVLayer


class KVCache(Cache):  # type: ignore[misc]
    """Takes the place of the attention cache in ``model(...)`` and ``model.generate(...)``.

    Full-attention layers hold sealed blocks and an exact tail; layers with a sliding window of their own stay
    transformers' (they are bounded anyway), unless the model has no other or ``shareable`` asks for ours.

    Args:
        config: the model's configuration.
        keys: codec of the keys: ``"exact"``, ``"int8"``, ``"int4:channel:g32"`` …; per channel by default.
        values: codec of the values; per token by default.
        retain: what stays: ``None`` for all, :class:`Window`, :class:`Importance`.
        block_size: tokens encoded, evicted and shared at once.
        residual: newest tokens that stay exact.
        shareable: use our layers for sliding windows too, so that a :class:`PrefixCache` can share them.
        offload: keep sealed blocks in host memory; attention brings them to the device a tile at a time.

    Raises:
        QkvError: a codec, size or budget that does not exist, or a model none of whose layers can be held.

    Example:
        >>> cache = KVCache(model.config, keys="int8", values="int4")   # doctest: +SKIP
        >>> model.generate(**inputs, cache=cache)   # doctest: +SKIP
    """

    def __init__(
        self,
        config: Any,
        *,
        keys: str | Codec = "int8",
        values: str | Codec = "int8",
        retain: Retention | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        residual: int = DEFAULT_RESIDUAL,
        shareable: bool = False,
        offload: bool = False,
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        angles = rotary_angles(decoder)
        settings = LayerSettings(
            keys=Codec.parse(keys, "channel"),
            values=Codec.parse(values, "token"),
            block_size=block_size,
            residual=residual,
            retain=retain if retain is not None else KeepAll(),
            rotation=None if angles is None else Rotation(*angles),
            offload=offload,
        )
        check_rotation(settings)
        self._begin(make_layers(decoder, settings, shareable), settings, model_key(decoder))

    def _begin(self, layers: list[Any], settings: LayerSettings, model_key: str) -> None:
        super().__init__(layers=layers)
        self.settings, self.model_key = settings, model_key
        self._attachment: hf_attention.Attachment | None = None
        self._announced: dict[bool, tuple[int, int]] = {}
        self._shared_batch = -1
        self._share_tokens()

    @classmethod
    def from_layers(cls, layers: list[Any], settings: LayerSettings, model_key: str) -> KVCache:
        """A cache of layers that exist already (a saved one)."""
        cache = cls.__new__(cls)
        cache._begin(layers, settings, model_key)
        return cache

    # --- what is asked -----------------------------------------------------------------------------------

    @property
    def block_layers(self) -> list[CacheLayer]:
        """Our layers, in order."""
        return [layer.core for layer in self.layers if isinstance(layer, KVLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers, metadata included; a block that rows share counts once."""
        stock = sum(stock_nbytes(layer) for layer in self.layers if not isinstance(layer, KVLayer))
        return stock + sum(layer.nbytes for layer in self.block_layers)

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        """What two caches must agree on to share blocks: tagged values."""
        layers = [str(layer.settings) for layer in self.block_layers]
        return (("model", self.model_key), ("layers", json.dumps(layers)))

    @property
    def num_held(self) -> int:
        """Tokens that the fullest row of the fullest of our layers holds."""
        return max((layer.num_held for layer in self.block_layers), default=0)

    def room(self) -> int:
        """Tokens one step may append, each attending as it would alone (see ``CacheLayer.room``)."""
        return min(layer.room() for layer in self.block_layers)

    def report(self) -> CacheReport:
        """Where the bytes are; prints as a table."""
        stock = [(type(v).__name__, stock_nbytes(v)) for v in self.layers if not isinstance(v, KVLayer)]
        return report_layers(self.block_layers, stock)

    # --- transformers' interface -------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Add a step's tokens to a layer; returns what its attention reads.

        Raises:
            QkvError: where the model's one mask cannot be right for this layer.
        """
        if layer_idx >= len(self.layers):
            raise QkvError(f"layer {layer_idx} of a cache made for {len(self.layers)} layers: another model's config?")
        layer = self.layers[layer_idx]
        if not isinstance(layer, KVLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._share_bytes(key_states)
        if self._attachment is not None:
            layer.append(key_states, value_states, None)
            handle = hf_attention.BlockHandle(layer)
            return handle, handle
        self._warn_unseen_mass()
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._check_announced(layer, found[0].shape[-2])
        return found

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and first column of what ``update`` will return for a layer."""
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        layer = self.layers[layer_idx]
        if isinstance(layer, KVLayer):
            self._announced[layer.is_sliding] = (len(layer.core) + query_length, sizes[0])
        return sizes

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times; a budget in bytes is divided anew."""
        batch = max((layer.batch for layer in self.block_layers), default=0)
        self._divide_bytes(batch * repeats, self._stock_reserve(batch * repeats))
        super().batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens of every layer; see :meth:`KVLayer.crop`."""
        fresh = [layer for layer in self.layers if is_fresh(layer)]
        for layer in self.layers:
            if layer not in fresh:
                crop_layer(layer, tokens_to_remove)

    def reset(self) -> None:
        """Empty every layer."""
        super().reset()
        self._announced = {}
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    # --- attention ---------------------------------------------------------------------------------------

    def attach(self, model: Any) -> KVCache:
        """Make ``model`` read this cache through our attention over blocks; returns the cache.

        Raises:
            QkvError: a model that handles keys between cache and attention.
        """
        if self._attachment is None:
            self._attachment = hf_attention.Attachment(model)
        return self

    def detach(self) -> None:
        """Undo :meth:`attach`: the model gets back the attention it had."""
        if self._attachment is not None:
            self._attachment.undo()
            self._attachment = None

    # --- copies ------------------------------------------------------------------------------------------

    def fork(self) -> KVCache:
        """An independent cache over the same blocks; only tails and stock layers take memory of their own."""
        other = copy.copy(self)
        other.layers = [fork_layer(layer) for layer in self.layers]
        other._announced = {}
        other._attachment = None if self._attachment is None else self._attachment.again()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.fork()

    def empty(self) -> KVCache:
        """A new cache with the same settings and nothing in it."""
        other = self.fork()
        other.reset()
        return other

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; see :func:`qkv.integration.hf_cache_file.save_cache`."""
        from qkv.integration.hf_cache_file import save_cache

        save_cache(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> KVCache:
        """Read what :meth:`save` wrote, onto the model's ``device``; attach it to the model again where it was."""
        from qkv.integration.hf_cache_file import load_cache

        return load_cache(Path(path), device)

    # --- budgets -----------------------------------------------------------------------------------------

    def _share_tokens(self) -> None:
        """Give every layer its share of a budget in tokens."""
        retain, layers = self.settings.retain, self._budgeted()
        if not isinstance(retain, Importance):
            return
        for layer, share in zip(layers, retain.shares(len(layers)), strict=True):
            layer.settings = replace(layer.settings, token_share=share * len(layers))

    def _share_bytes(self, key_states: Tensor) -> None:
        batch = key_states.shape[0]
        if batch != self._shared_batch:
            self._divide_bytes(batch, self._stock_reserve(batch, key_states))

    def _divide_bytes(self, batch: int, reserve: int) -> None:
        """Give every layer its share of a budget in bytes, less what the model's own windows will take."""
        retain, layers = self.settings.retain, self._budgeted()
        self._shared_batch = batch
        if not isinstance(retain, Importance):
            return
        kind, amount = parse_budget(retain.budget)
        if kind != "bytes":
            return
        left = int(amount) - reserve
        for layer, share in zip(layers, retain.shares(len(layers)), strict=True):
            layer.settings = replace(layer.settings, byte_budget=max(0, int(left * share)))

    def _budgeted(self) -> list[CacheLayer]:
        return [v.core for v in self.layers if isinstance(v, KVLayer) and not v.is_sliding]

    def _stock_reserve(self, batch: int, key_states: Tensor | None = None) -> int:
        windows = [v for v in self.layers if isinstance(v, DynamicSlidingWindowLayer)]
        if key_states is not None and windows:
            each = key_states.shape[1] * key_states.shape[3] * key_states.element_size()
            self._window_token_nbytes = 2 * each
        token = getattr(self, "_window_token_nbytes", 0)
        return sum((v.sliding_window - 1) * token * batch for v in windows)

    # --- what must not pass in silence -------------------------------------------------------------------

    def _check_announced(self, layer: KVLayer, length: int) -> None:
        seen, announced = self._announced.get(layer.is_sliding, (-1, -1))
        if seen == len(layer.core) and announced != length:
            raise QkvError(
                f"this layer holds {length} tokens where the model's one mask is made for {announced}; "
                "unequal layers need KVCache.attach(model)"
            )

    def _warn_unseen_mass(self) -> None:
        if self.settings.retain.needs_mass and not getattr(self, "_warned", False):
            self._warned = True
            warnings.warn(
                "importance is scored without attention mass, by recency alone, because the model's own "
                "attention does not report it; KVCache.attach(model) does",
                stacklevel=4,
            )

    def __iter__(self) -> Iterator[Any]:
        raise QkvError("a KVCache does not hold plain key and value tensors to iterate over; see .block_layers")
