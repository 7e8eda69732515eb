"""SpeculativeDecoder: what a person calls to generate with drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from qkv.errors import QkvError, shown
from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache
from qkv.integration.inside import rows_inside
from qkv.integration.length import Length, make_length
from qkv.integration.live import DecoderFootprint, LivePatch, measure
from qkv.integration.loop import Loop
from qkv.integration.prepare import check_streamer, new_tokens, prepare_rows, split_prompts
from qkv.integration.sources import Source, make_source
from qkv.integration.stats import DecodeStats
from qkv.integration.walk import Row
from qkv.quantizers.format import Format

DEFAULT_CHUNK = 512


class SpeculativeDecoder:
    """Generate with drafts from any source; what comes out is what plain decoding would give with the same seed.

    Args:
        model: a decoder-only transformers model, quantized or not.
        source: ``"none"``, ``"lookup"``, ``"ngram"``, ``"model:DIR"``, ``"self:FORMAT"``, a draft model, or a
            :class:`Source`.
        length: a number of tokens, ``"adaptive"``, ``"fixed"``, or a :class:`Length`.
        cache: settings of the cache as an empty :class:`qkv.KVCache`; transformers' DynamicCache by default.
        accept: ``"coupled"``, or ``"rejection"`` (Leviathan et al.), which accepts a little more often, but
            whose output depends on the source.
        chunk: tokens of a prompt that are prefilled at once at most; never more than the cache's room.

    Raises:
        QkvError: an unknown name, a draft of another vocabulary, an encoder-decoder model.

    Example:
        >>> decoder = SpeculativeDecoder(model, source="lookup")   # doctest: +SKIP
        >>> ids = decoder.generate(input_ids, max_new_tokens=200, do_sample=True, seed=0)   # doctest: +SKIP
        >>> print(decoder.stats)   # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        *,
        source: Any = "none",
        length: int | str | Length = "adaptive",
        cache: KVCache | None = None,
        accept: str = "coupled",
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        if accept not in ("coupled", "rejection"):
            raise QkvError(f"accept {accept!r} is neither 'coupled' nor 'rejection'")
        if not isinstance(chunk, int) or chunk < 1:
            raise QkvError(f"a chunk of {chunk!r} tokens prefills nothing; give a whole number, 1 or more")
        if not hasattr(model, "config") or not hasattr(model, "generate"):
            raise QkvError(f"{shown(model)} cannot generate; give a transformers model with an output head")
        if model.config.is_encoder_decoder:
            raise QkvError(f"{type(model).__name__} has an encoder; only decoders can be decoded speculatively here")
        if cache is not None and not isinstance(cache, KVCache):
            raise QkvError("cache= of a decoder is an empty qkv.KVCache; give others to generate(cache=...)")
        self.model, self.cache, self.accept, self.chunk = model, cache, accept, chunk
        self.source: Source | None = make_source(source, model)
        self.length: Length = make_length(length)
        self.stats = DecodeStats()
        self.last_cache: Any = None
        self._patch: LivePatch | None = None

    # --- what a person calls -----------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        cache: Any = None,
        streamer: Any = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> Tensor:
        """Continue prompts.

        Args:
            input_ids: int64 ``[batch, tokens]``, padded on the left.
            attention_mask: ``[batch, tokens]``, 0 where a prompt is padded.
            seed: of the noise where ``do_sample``; drawn from torch's generator where None; one a row is allowed.
            cache: a cache to continue instead of the decoder's own, of one row.
            streamer: of transformers; one row only.
            tokenizer: needed with ``stop_strings``.
            **options: fields of a transformers ``GenerationConfig``, or ``generation_config=``,
                ``logits_processor=``, ``stopping_criteria=``, ``prefix_allowed_tokens_fn=``.

        Returns:
            int64 ``[batch, tokens + longest output]``, as ``model.generate`` returns it.

        Raises:
            QkvError: an option that is not supported, or inputs that do not fit.
        """
        prompts = split_prompts(input_ids, attention_mask, self.model.device)
        if new_tokens(options) == 0:
            return input_ids
        rows = prepare_rows(self.model, prompts, seed, tokenizer, options, self.accept)
        check_streamer(streamer, rows)
        for emitted in self._run(rows, cache):
            if streamer is not None:
                for token in emitted[0]:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        repeats = len(rows) // len(prompts)
        return _joined(input_ids.to(self.model.device).repeat_interleave(repeats, 0), rows, self._pad(options))

    def stream(self, prompt: str | Tensor, tokenizer: Any, **options: Any) -> Iterator[str]:
        """Yield the text as it is generated, in pieces that are whole characters.

        Args:
            prompt: text, or ids ``[1, tokens]``.
            tokenizer: of the model.
            **options: those of :meth:`generate`.
        """
        ids = tokenizer(prompt, return_tensors="pt").input_ids if isinstance(prompt, str) else prompt
        if new_tokens(options) == 0:
            return
        seed, cache = options.pop("seed", None), options.pop("cache", None)
        prompts = split_prompts(ids, None, self.model.device)
        rows = prepare_rows(self.model, prompts, seed, tokenizer, options, self.accept)
        if len(rows) > 1:
            raise QkvError(f"stream yields one text, not {len(rows)}; use generate")
        new, shown, read = rows[0].new_ids, 0, 0
        for emitted in self._run(rows, cache):
            new += emitted[0]
            before = tokenizer.decode(new[shown:read], skip_special_tokens=True)
            text = tokenizer.decode(new[shown:], skip_special_tokens=True)
            if len(text) > len(before) and (rows[0].is_finished or not text.endswith("\ufffd")):
                yield text[len(before) :]
                shown, read = read, len(new)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """What ``model.generate(..., custom_generate=decoder)`` calls, with everything prepared.

        Args:
            seed: of the noise, for all rows: ``model.generate(..., custom_generate=decoder, seed=0)``.

        Returns:
            ``[batch, tokens + longest output]``; rows that ended before are filled up with the padding token.

        Transformers hands no streamer on to a callable: use :meth:`generate` or :meth:`stream` for that.
        """
        if model is not self.model:
            raise QkvError("custom_generate= is a decoder made for another model")
        if synced_gpus:
            raise QkvError("synced_gpus=True: this decoder does not run in step with other processes")
        rows = rows_inside(
            input_ids, logits_processor, stopping_criteria, generation_config, seed, self.accept, model_kwargs
        )
        given = model_kwargs.get(cache_argument(model))
        for _ in self._run(rows, given if self.cache is None or isinstance(given, KVCache) else None):
            pass
        return _joined(input_ids, rows, self._pad({"generation_config": generation_config}))

    # --- what changes it while it lives ------------------------------------------------------------------

    def patch_(
        self, *, weights: str | Format | None = None, draft_weights: str | Format | None = None, **cache: Any
    ) -> SpeculativeDecoder:
        """Quantize the target, the draft model and the cache of this decoder in place; returns it.

        The originals stay in memory until :meth:`unpatch_` puts them back bit for bit, and :meth:`footprint` counts
        them: this compares formats in a live decoder; ``qkv.quantize_`` is what saves memory.

        Args:
            weights: format of the target's linear layers; ``draft_weights`` of the draft model's.
            **cache: ``keys``, ``values``, ``retain`` and other options of :class:`qkv.KVCache`, for the
                generations to come.

        Raises:
            QkvError: patched already, nothing to do, or a format that does not exist; nothing has changed then.
        """
        if self._patch is not None:
            raise QkvError("this decoder is patched already; call unpatch_() first")
        self._patch = LivePatch(self, weights, draft_weights, cache)
        return self

    def unpatch_(self) -> SpeculativeDecoder:
        """Undo :meth:`patch_`; nothing where there is none. Returns the decoder."""
        if self._patch is not None:
            self._patch.undo()
            self._patch = None
        return self

    def footprint(self) -> DecoderFootprint:
        """Bytes of target, draft and caches now, and before :meth:`patch_`; prints as a table."""
        return measure(self, self._patch)

    # --- inside ------------------------------------------------------------------------------------------

    def _run(self, rows: list[Row], given: Any) -> Iterator[list[list[int]]]:
        """Generate; yields what each row emitted, ``[]`` for rows that ended before."""
        cache = given if given is not None else self._new_cache()
        attached = _attach(cache, self.model)
        loop = Loop(self.model, self.source, self.length, self.chunk)
        self.stats, self.last_cache = loop.stats, cache
        try:
            yield from loop.run(rows, cache)
        finally:
            if attached:
                cache.detach()

    def _new_cache(self) -> Any:
        return DynamicCache(config=self.model.config) if self.cache is None else self.cache.empty()

    def _pad(self, options: Mapping[str, Any]) -> int:
        config = options.get("generation_config") or self.model.generation_config
        pad = options.get("pad_token_id", config.pad_token_id)
        eos = options.get("eos_token_id", config.eos_token_id)
        found = pad if pad is not None else eos
        return int(found[0] if isinstance(found, (list, tuple)) else found or 0)


def _attach(cache: Any, model: Any) -> bool:
    """Let the model read a cache of ours block by block where it can; whether that is to be undone."""
    if not isinstance(cache, KVCache) or cache._attachment is not None:
        return False
    try:
        cache.attach(model)
    except QkvError:
        return False
    return True


def _joined(input_ids: Tensor, rows: list[Row], pad: int) -> Tensor:
    longest = max(len(row.new_ids) for row in rows)
    new = [row.new_ids + [pad] * (longest - len(row.new_ids)) for row in rows]
    return torch.cat((input_ids, torch.tensor(new, dtype=torch.long, device=input_ids.device)), 1)
