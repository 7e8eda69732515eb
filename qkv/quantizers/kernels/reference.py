"""The reference: dequantize, then multiply. Every other back end is held to it; it is the slowest."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.quantizers.kernels.case import Case
from qkv.quantizers.tensor import QuantizedTensor, decode_groups, decode_rows, saturating_cast

SERVES = "every format, dtype, shape and device; the slowest"


def unavailable() -> None:
    """Always there."""


def refuses(case: Case) -> None:
    """Takes everything."""


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` with the weight dequantized to x's dtype."""
    return torch.nn.functional.linear(x, decode_rows(weight, x.dtype), bias)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The float weight, a few million elements at a time."""
    return decode_rows(weight, dtype)


def decode_whole(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The same in one expression without loops, for ``torch.compile`` to trace and fuse."""
    columns = weight.shape[-1]
    groups = decode_groups(weight, weight.codes, weight.float_scale(), weight.zero)
    return saturating_cast(groups.flatten(-2)[..., :columns], dtype)
