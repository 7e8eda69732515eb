"""What a step of a few tokens takes between its products, by the native library, in bfloat16.

Like those of :mod:`native` the functions are called often and check nothing: whoever calls them has asked
:func:`native.is_plain_bf16` about every tensor.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qkv.quantizers.kernels import native
from qkv.quantizers.kernels.native_attention import MAX_QUERIES, Call, run

MOST: Final = 65536
"""Elements of a step; of more, torch's operations are worth their calls."""
MOST_ROWS: Final = 8
"""Rows of a batch whose attention is served: one call each."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps)``, summed in float32, times ``offset + weight``.

    Args:
        x: ``[..., columns]``, contiguous.
        weight: ``[columns]``, contiguous.
        eps: added to the mean square.
        offset: 0, where the normalised x is rounded to bfloat16 before it is multiplied, as Llama does; or 1, where it
            is not, as Gemma does.
    """
    y, columns = torch.empty_like(x), weight.shape[0]
    arguments = (x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // columns, columns, eps, offset)
    native.library().qkv_rms_norm(*arguments)
    return y


def serves_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`attend_few` takes these; it is fast where the library has AVX-512."""
    return (
        0 < query.shape[2] <= min(MAX_QUERIES, key.shape[2])
        and query.shape[0] <= MOST_ROWS
        and query.shape[1] % key.shape[1] == 0
        and native.cannot_serve_bf16() is None
        and all(native.is_plain_bf16(x) and x.stride(3) == 1 for x in (query, key, value))
    )


def attend_few(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the newest tokens, up to ``MAX_QUERIES`` of them: the last one sees all keys.

    Args:
        query: ``[batch, heads, queries, dim]``.
        key, value: ``[batch, kv heads, tokens, dim]``; any strides, channels side by side.
        scale: of the scores, above 0.

    Returns:
        bfloat16 ``[batch, queries, heads, value dim]``.
    """
    batch, heads, queries, _ = query.shape
    kv_heads, width, dtype = key.shape[1], value.shape[3], native.DTYPES[torch.bfloat16]
    output = query.new_empty(batch, queries, heads, width)
    call = Call(heads=kv_heads, group=heads // kv_heads, dtype=dtype, block_size=64, scale=scale)
    call.tokens = call.num_open = queries
    call.query_head_stride, call.query_token_stride = query.stride(1), query.stride(2)
    tail = call.tail
    tail.tokens, tail.dtype = key.shape[2], dtype
    for part, tensor in enumerate((key, value)):
        call.side[part].dim, call.side[part].dtype = tensor.shape[3], dtype
        tail.head_stride[part], tail.token_stride[part] = tensor.stride(1), tensor.stride(2)
    for row in range(batch):
        call.queries = query.data_ptr() + 2 * row * query.stride(0)
        call.output = output.data_ptr() + 2 * row * queries * heads * width
        tail.data[0] = key.data_ptr() + 2 * row * key.stride(0)
        tail.data[1] = value.data_ptr() + 2 * row * value.stride(0)
        run(call)
    return output
