"""A live decoder's weights and cache: replaced in place, restored bit for bit, and counted."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qkv.errors import QkvError
from qkv.integration.hf_cache import KVCache
from qkv.integration.patch import patched
from qkv.integration.sources.model import ModelSource
from qkv.integration.sources.self_draft import quantized_copy
from qkv.quantizers.format import Format
from qkv.quantizers.holder import Holder
from qkv.units import format_bytes

if TYPE_CHECKING:
    from qkv.integration.decoder import SpeculativeDecoder


@dataclass(frozen=True)
class DecoderFootprint:
    """Bytes of a decoder's parts; a storage that several share counts with the first.

    ``patch_`` makes a decoder's memory larger, not smaller, until the originals are let go: they are ``kept``, and
    part of ``total``. To have the smaller size for good, quantize the models with ``qkv.quantize_`` instead.

    Args:
        target: weights and buffers of the target, and what kernels packed for themselves.
        draft: those of the draft model, less what it shares with the target.
        kept: originals that ``unpatch_`` will put back.
        cache: the target's cache of the last generation, which the decoder holds until the next one begins;
            ``draft_cache`` the draft's.
        before: the same before ``patch_``.
    """

    target: int
    draft: int
    kept: int
    cache: int
    draft_cache: int
    before: DecoderFootprint | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return self.target + self.draft + self.kept + self.cache + self.draft_cache

    def __str__(self) -> str:
        names = ("target", "draft", "kept", "cache", "draft_cache", "total")
        lines = [f"{'':12} {'now':>12}" + (f" {'before':>12}" if self.before else "")]
        for name in names:
            old = f" {format_bytes(getattr(self.before, name)):>12}" if self.before else ""
            lines.append(f"{name.replace('_', ' '):12} {format_bytes(getattr(self, name)):>12}{old}")
        return "\n".join(lines)


class LivePatch:
    """What ``patch_`` did to a decoder, and how to undo it.

    Args:
        decoder: not patched yet.
        weights: format of the target's linear layers; None leaves them.
        draft_weights: likewise of the draft model.
        cache: options of :class:`qkv.KVCache` for the generations to come; none leaves the cache.

    Raises:
        QkvError: nothing to do, a decoder without a draft model, or what ``quantize_`` and ``KVCache`` refuse;
            nothing has changed then.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        weights: str | Format | None,
        draft_weights: str | Format | None,
        cache: dict[str, Any],
    ) -> None:
        if weights is None and draft_weights is None and not cache:
            raise QkvError("patch_ was asked for nothing; give weights, draft_weights, keys, values or retain")
        self.before = decoder.footprint()
        self._originals = [*_tensors(decoder.model), *_tensors(_draft_model(decoder))]
        with ExitStack() as stack:
            if cache:
                stack.callback(setattr, decoder, "cache", decoder.cache)
                decoder.cache = KVCache(decoder.model.config, **cache)
            if weights is not None:
                stack.enter_context(patched(decoder.model, weights))
            if draft_weights is not None:
                _patch_draft(decoder, draft_weights, stack)
            self._undo = stack.pop_all()

    def undo(self) -> None:
        """Put everything back."""
        self._undo.close()
        self._originals = []

    @property
    def originals(self) -> list[Tensor]:
        """The tensors that wait to be put back, and those in use still."""
        return self._originals


def measure(decoder: SpeculativeDecoder, patch: LivePatch | None) -> DecoderFootprint:
    """Count a decoder's storages."""
    seen: set[int] = set()
    source = decoder.source
    return DecoderFootprint(
        target=_fresh_nbytes(_tensors(decoder.model), seen) + _packed_nbytes(decoder.model),
        draft=_fresh_nbytes(_tensors(_draft_model(decoder)), seen) + _packed_nbytes(_draft_model(decoder)),
        kept=_fresh_nbytes(patch.originals if patch else (), seen),
        cache=_cache_nbytes(decoder.last_cache),
        draft_cache=_cache_nbytes(source.cache) if isinstance(source, ModelSource) else 0,
        before=patch.before if patch else None,
    )


def _patch_draft(decoder: SpeculativeDecoder, format: str | Format, stack: ExitStack) -> None:
    source = decoder.source
    if not isinstance(source, ModelSource):
        raise QkvError("draft_weights= needs a decoder whose source is a model; this one has none")
    if not any(isinstance(module, Holder) for module in source.model.modules()):
        stack.enter_context(patched(source.model, format))
        return
    stack.callback(setattr, source, "model", source.model)
    source.model = quantized_copy(source.model, format)


def _draft_model(decoder: SpeculativeDecoder) -> nn.Module | None:
    return decoder.source.model if isinstance(decoder.source, ModelSource) else None


def _tensors(model: nn.Module | None) -> list[Tensor]:
    return [] if model is None else [*model.parameters(), *model.buffers()]


def _packed_nbytes(model: nn.Module | None) -> int:
    """Copies that kernels keep for themselves."""
    modules = () if model is None else model.modules()
    return sum(module.packed_nbytes for module in modules if isinstance(module, Holder))


def _fresh_nbytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _cache_nbytes(cache: Any) -> int:
    if cache is None:
        return 0
    if isinstance(cache, KVCache):
        return cache.nbytes
    held = [
        tensor for layer in cache.layers for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
    ]
    return _fresh_nbytes([tensor for tensor in held if isinstance(tensor, Tensor)], set())
