"""Attention over blocks without unpacking the layer: which back end does it, a visible table tried in order.

For a key stored as ``(code - zero) * scale`` with a scale a channel,
``q·k = (q * scale)·code - (q * scale)·zero``: the scale is multiplied into the query once a block and the
zero point is one number a block. For a value with a scale a token, ``p @ v = (p * scale) @ (code - zero)``: the
scale goes into the probabilities. The online softmax is FlashAttention's (arXiv 2205.14135); the mass of each
block falls out of it. The queries of a group are rows that share one reading of their keys.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Final

from torch import Tensor

from qkv.cache import attention_native, attention_torch, attention_triton
from qkv.cache.attention_case import Asked, Attended
from qkv.cache.view import RowView
from qkv.quantizers.kernels import BackendStatus
from qkv.quantizers.kernels.choose import KERNELS_VARIABLE, NATIVE_LEVELS

BACKENDS: Final[dict[str, ModuleType]] = {
    "native": attention_native,
    "triton": attention_triton,
    "torch": attention_torch,
}
"""Back ends from the fastest to the one that always works: modules with ``SERVES``, ``unavailable()``,
``refuses(asked)`` and ``attend(asked)``. ``QKV_KERNELS`` limits them as it does those of linear layers."""


def attend(
    queries: Tensor,
    view: RowView,
    *,
    scale: float,
    block_size: int,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
    open_mask: Tensor | None = None,
    with_mass: bool = False,
) -> Attended:
    """Attention of one row's open queries over everything the row may read.

    Args:
        queries: ``[query_heads, tokens, key_dim]``, one a open token and in their order.
        view: the row's table and tail; the open tokens are the tail's last.
        scale: multiplies the scores. ``softcap``: scores become ``softcap * tanh(score / softcap)``.
        sink_logits: ``[query_heads]``: learned logits that take part in the softmax and carry no value.
        positions: ``long [tokens]``; consecutive from the view's first query unless given (a tree's).
        open_mask: ``bool [tokens, open]``: which open tokens each query sees; causal unless given.
        with_mass: whether to return the mass of each block.

    Returns:
        Output and masses. Queries beyond the open tokens (padding) must be cut off by the caller.
    """
    asked = Asked(queries, view, scale, block_size, softcap, sink_logits, positions, open_mask, with_mass)
    found: Attended = choose(asked).attend(asked)
    return found


def choose(asked: Asked) -> ModuleType:
    """The first back end of the table that is live and takes ``asked``."""
    forced = os.environ.get(KERNELS_VARIABLE)
    for name, backend in BACKENDS.items():
        if name != "torch" and forced and name != ("native" if forced in NATIVE_LEVELS else forced):
            continue
        if backend.unavailable() is None and backend.refuses(asked) is None:
            return backend
    raise AssertionError("torch takes every case")


def status() -> list[BackendStatus]:
    """One row a back end, in the order in which they are tried."""
    return [BackendStatus(name, backend.unavailable(), backend.SERVES) for name, backend in BACKENDS.items()]
