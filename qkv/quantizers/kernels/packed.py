"""Packed copies: what a kernel needs that cannot read the codes as they are stored.

A copy is made at the first product, stays with the :class:`QuantizedTensor`, is never saved, and is counted by
:func:`qkv.footprint`. It is made anew when the codes or the scales have changed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qkv.quantizers.tensor import QuantizedTensor


def packed(weight: QuantizedTensor, make: Callable[[QuantizedTensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``make(weight)``, remembered until the weight changes."""
    stamp = tuple(_stamp(tensor) for tensor in (weight.codes, weight.scale, weight.zero) if tensor is not None)
    if weight.packed is None or weight.packed_stamp != stamp:
        weight.packed, weight.packed_stamp = make(weight), stamp
    return weight.packed


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies and how often it was written to; inference tensors do not count writes."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
