"""Attention over plain tensors: what a model whose cache is attached does in layers that are not ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend_dense(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    built: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """``[batch, tokens, heads, dim]``, as transformers' own attention; ``built`` is the mask that it takes."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        return _eager(query, key, value, built, kwargs)
    if _is_packable(query, key, built) and not dropout and kwargs.get("position_bias") is None:
        return _packed(query, key, value, built, kwargs.get("scaling"))
    output: Tensor = stock_attention()(module, query, key, value, built, dropout=dropout, **kwargs)[0]
    return output


def stock_attention() -> Any:
    """transformers' function over scaled-dot-product attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def _is_packable(query: Tensor, key: Tensor, built: Tensor | None) -> bool:
    """Whether a single query's group can be rows that share one reading of the keys. On the CPU torch's own
    ``enable_gqa`` takes about ten times as long."""
    shared = built is None or built.shape[1] == 1
    return query.device.type == "cpu" and query.shape[2] == 1 and query.shape[1] != key.shape[1] and shared


def _packed(query: Tensor, key: Tensor, value: Tensor, built: Tensor | None, scale: float | None) -> Tensor:
    batch, heads, _, dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, dim)
    output = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=built, scale=scale)
    return output.reshape(batch, 1, heads, -1)


def _eager(query: Tensor, key: Tensor, value: Tensor, built: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """Dense attention with soft-capped scores or sink logits, which scaled-dot-product attention lacks."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).float(), value.repeat_interleave(groups, 1).float()
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    scores = query.float() @ key.transpose(2, 3) * scale
    if (softcap := kwargs.get("softcap")) is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if built is None:
        built = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(
            scores.shape[-1] - scores.shape[-2]
        )
    scores = scores.masked_fill(~built, -torch.inf) if built.dtype == torch.bool else scores + built
    if (sinks := kwargs.get("s_aux")) is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ value).to(query.dtype).transpose(1, 2).contiguous()
