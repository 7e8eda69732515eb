"""Our attention over blocks as a transformers attention implementation, ``"qkv"``, with its mask function."""

from __future__ import annotations

import sys
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.cache.attention import attend
from qkv.errors import QkvError
from qkv.integration.hf_dense import attend_dense, stock_attention
from qkv.integration.hf_layer import KVLayer

NAME = "qkv"
_IGNORED = frozenset(
    "position_ids use_cache output_attentions output_hidden_states is_causal sliding_window cache_position "
    "num_items_in_batch logits_to_keep return_dict cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k "
    "position_embeddings token_type_ids past_key_values cache output_router_logits".split()
)


class Attachment:
    """One cache's claim on a model's attention; undone with the last claim.

    Args:
        model: a transformers model that goes straight from its cache to its attention.

    Raises:
        QkvError: a model that does not.
    """

    _claims: ClassVar[weakref.WeakKeyDictionary[Any, tuple[str, int]]] = weakref.WeakKeyDictionary()

    def __init__(self, model: Any) -> None:
        _check_model(model)
        register()
        self._model, self._is_held = weakref.ref(model), True
        previous, count = self._claims.get(model, (model.config._attn_implementation, 0))
        self._claims[model] = (previous, count + 1)
        if count == 0:
            model.set_attn_implementation(NAME)

    def again(self) -> Attachment | None:
        """A second claim on the same model; None where it is gone."""
        model = self._model()
        return None if model is None else type(self)(model)

    def undo(self) -> None:
        """Give the claim up."""
        model = self._model()
        if not self._is_held or model is None or model not in self._claims:
            return
        self._is_held = False
        previous, count = self._claims.pop(model)
        if count > 1:
            self._claims[model] = (previous, count - 1)
        else:
            model.set_attn_implementation(previous)

    def __del__(self) -> None:
        if getattr(self, "_is_held", False) and not sys.is_finalizing():
            self.undo()


def own_implementation(model: Any) -> str | None:
    """The attention that a model has, or gets back when its caches are detached; None where it takes none by name."""
    if not getattr(model, "_supports_attention_backend", False):
        return None
    name: str | None = Attachment._claims.get(model, (model.config._attn_implementation, 0))[0]
    return name


def set_own_implementation(model: Any, name: str) -> None:
    """Change what :func:`own_implementation` says; a cache that is attached stays."""
    if model in Attachment._claims:
        Attachment._claims[model] = (name, Attachment._claims[model][1])
    else:
        model.set_attn_implementation(name)


class LazyMask:
    """What the mask function returns: the padding, and the stock mask if someone needs it after all."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._built: Tensor | None = None
        self._done = False

    @property
    def padding(self) -> Tensor | None:
        """``bool [batch, columns]``, True where a token is real; None where all are."""
        padding: Tensor | None = self._arguments.get("attention_mask")
        return padding

    @property
    def is_causal(self) -> bool:
        """Whether it is the plain causal pattern."""
        from transformers.masking_utils import causal_mask_function

        return self._arguments.get("mask_function", causal_mask_function) is causal_mask_function

    def stock(self) -> Tensor | None:
        """The mask scaled-dot-product attention takes."""
        if not self._done:
            from transformers.masking_utils import sdpa_mask

            self._built, self._done = sdpa_mask(**self._arguments), True
        return self._built

    def __getattr__(self, name: str) -> Any:
        raise QkvError(
            f"this model reads {name!r} of its attention mask, which our attention does not build; detach "
            "the cache and let the model's own attention read it"
        )


class BlockHandle:
    """Stands for a layer's keys and values between ``Cache.update`` and the attention."""

    def __init__(self, layer: KVLayer) -> None:
        self._layer: KVLayer | None = layer

    def take(self) -> KVLayer:
        """The layer, once."""
        layer, self._layer = self._layer, None
        if layer is None:
            raise QkvError("this model reads one layer's keys twice (shared between layers); detach the cache")
        return layer

    def __getattr__(self, name: str) -> Any:
        raise QkvError(
            f"this model reads {name!r} of its keys between cache and attention, where they are still "
            "encoded; detach the cache and let the model's own attention read it"
        )


def register() -> None:
    """Make ``attn_implementation="qkv"`` known, attention and mask together."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(*args: Any, **kwargs: Any) -> LazyMask:
    """The mask function registered beside :func:`attention`."""
    if args:
        raise QkvError("transformers passes the mask's arguments by name; this version does not")
    return LazyMask(kwargs)


def attention(
    module: Any, query: Tensor, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of ``query [batch, heads, tokens, dim]`` over a handle, or over plain tensors as stock does.

    Returns:
        ``[batch, tokens, heads, dim]`` and None.
    """
    if not isinstance(key, BlockHandle):
        built = attention_mask.stock() if isinstance(attention_mask, LazyMask) else attention_mask
        return attend_dense(module, query, key, value, built, dropout, kwargs), None
    layer = key.take()
    scale, softcap, sinks = (
        kwargs.pop("scaling", None),
        kwargs.pop("softcap", None),
        kwargs.pop("s_aux", None),
    )
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _IGNORED)
    if unknown or dropout:
        raise QkvError(f"our attention does not know {', '.join(unknown) or 'dropout'}; detach the cache")
    if not isinstance(attention_mask, LazyMask) or not (attention_mask.is_causal or layer.is_sliding):
        raise QkvError("our attention masks causally and by padding; this call wants another pattern: detach the cache")
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    step = _Step(layer, query, attention_mask.padding, float(scale), softcap, sinks)
    output = _first_prefill(module, step) if step.is_first_prefill else step.run()
    if not layer.record_past:
        layer.core.commit(step.kept)
    elif step.kept is not None:
        raise QkvError("padding inside a step that may be taken back; pad on the left, or do not record")
    return output, None


class _Step:
    """One layer's step: its rows' real tokens, and attention over each row."""

    def __init__(
        self, layer: KVLayer, query: Tensor, padding: Tensor | None, scale: float, softcap: Any, sinks: Any
    ) -> None:
        self.layer, self.core, self.query = layer, layer.core, query
        self.scale, self.softcap, self.sinks = scale, softcap, sinks
        self.kept: list[list[int]] | None = None
        self.real: list[list[int]] | None = None
        if padding is not None:
            self._place(padding[:, -query.shape[2] :])

    def _place(self, real: Tensor) -> None:
        """Rows that begin in this step start at their first real token; padding elsewhere is not kept."""
        if bool(real.all()):
            return
        tokens = self.query.shape[2]
        rows = [[i for i, is_real in enumerate(row) if is_real] for row in real.tolist()]
        before = len(self.core) - self.core.num_open
        kept = []
        for row, found in zip(self.core.rows, rows, strict=True):
            first = found[0] if found else tokens
            is_suffix = len(found) == tokens - first
            if is_suffix and row.start >= before and row.sealed == 0:
                row.start = len(self.core) - tokens + first
                found = list(range(tokens))
            kept.append(found)
        self.real = rows
        if any(len(row) < tokens for row in kept):
            self.kept = kept

    @property
    def is_first_prefill(self) -> bool:
        """Whether stock attention over the step's own tokens is all there is to do."""
        core, tokens = self.core, self.query.shape[2]
        retain = core.settings.retain
        fresh = len(core) == tokens == core.num_open and all(row.start == 0 for row in core.rows)
        near = retain.reach is None or tokens <= retain.reach
        plain = self.softcap is None and self.sinks is None and self.kept is None
        return fresh and near and plain and not retain.needs_mass and not retain.num_observed

    def run(self) -> Tensor:
        """``[batch, tokens, heads, dim]``; zeros for padding."""
        batch, heads, tokens, _ = self.query.shape
        views = self.core.attendable()
        output = self.query.new_zeros(batch, tokens, heads, views[0].tail_values.shape[2])
        for index, view in enumerate(views):
            count = min(view.num_open, tokens)
            if count == 0:
                continue
            queries = self.query[index, :, tokens - count :]
            retain = self.core.settings.retain
            positions, open_mask = self._inside_padding(index, view)
            found = attend(
                queries,
                view,
                scale=self.scale,
                block_size=self.core.block_size,
                softcap=self.softcap,
                sink_logits=self.sinks,
                positions=positions,
                open_mask=open_mask,
                with_mass=retain.needs_mass,
            )
            output[index, tokens - count :] = found.output.transpose(0, 1)
            self._observe(index, queries, found.mass, found.focus)
        return output

    def _inside_padding(self, index: int, view: Any) -> tuple[Tensor | None, Tensor | None]:
        """Positions and mask of a row with padding among its tokens; None for a row without."""
        if self.kept is None or self.real is None or len(self.kept[index]) == self.query.shape[2]:
            return None, None
        tokens = self.query.shape[2]
        real = torch.zeros(tokens, dtype=torch.bool, device=self.query.device)
        real[self.real[index]] = True
        positions = view.first_query + (real.cumsum(0) - 1).clamp(min=0)
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=real.device).tril()
        return positions, (causal & real[None]) | torch.eye(tokens, dtype=torch.bool, device=real.device)

    def _observe(self, index: int, queries: Tensor, mass: Tensor | None, focus: Tensor | None) -> None:
        retain = self.core.settings.retain
        if not retain.needs_mass and not retain.num_observed:
            return
        missing = self.query.shape[2] - queries.shape[1]
        grouped = None
        if retain.num_observed:
            heads = self.core.store.layout.heads if self.core.store is not None else 1
            grouped = torch.unflatten(queries * self.scale, 0, (heads, -1))
            grouped = torch.nn.functional.pad(grouped, (0, 0, missing, 0)) if missing else grouped
        if mass is not None and focus is not None and missing:
            mass, focus = (torch.nn.functional.pad(t, (0, 0, missing, 0)) for t in (mass, focus))
        self.core.observe(index, mass, focus, grouped)


def _first_prefill(module: Any, step: _Step) -> Tensor:
    """Nothing is sealed yet: stock attention over the step's own tokens, to the last bit."""
    tail = step.core.tail
    assert tail is not None
    output, _ = stock_attention()(module, step.query, tail.keys, tail.values, None, scaling=step.scale, is_causal=True)
    found: Tensor = output
    return found


def _check_model(model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise QkvError(f"{config.model_type} expands latent keys between cache and attention; use the cache unattached")
    if getattr(config, "num_kv_shared_layers", None):
        raise QkvError(f"{config.model_type} shares keys between layers; use the cache unattached")
    if not getattr(model, "_supports_attention_backend", False):
        raise QkvError(
            f"{type(model).__name__} does not take its attention from the registry; use the cache unattached"
        )
