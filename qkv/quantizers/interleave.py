"""Weights interleaved by sixteen output features: the order in which several rows of x are multiplied fastest.

Of sixteen rows of codes, the first four bytes of each come first, then the next four of each, and so on; scales and
zero points likewise, one of each row at a time. The bytes and their number stay the same, so that an interleaved tensor
can take the place of the stored one in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from qkv.quantizers.format import Format

ROWS: Final = 16
UNIT: Final = 4
"""Bytes of a row of codes that stay together."""


def refuses(format: Format, shape: tuple[int, ...]) -> str | None:
    """Why a weight of ``shape`` cannot be interleaved; None when it can."""
    if len(shape) != 2 or shape[0] % ROWS or not shape[0]:
        return f"needs output features in a multiple of {ROWS}, and has {shape[0]}"
    size = format.group_length(shape[1])
    if size * format.bits % (8 * UNIT) or (size % 16 and size < shape[1]):
        return f"needs groups of a multiple of 16 elements, and has groups of {size}"
    if format.group_size == "tensor":
        return "needs a scale for each row, and has one for the tensor"
    return None


def interleaved(tensor: Tensor) -> Tensor:
    """Codes ``[out, groups, bytes of a group]``, or scales or zero points ``[out, groups]``, in the new order."""
    return _turned(tensor, lambda units: units.reshape(-1, ROWS, units.numel() // tensor.shape[0]))


def in_order(tensor: Tensor) -> Tensor:
    """Undo :func:`interleaved`."""
    return _turned(tensor, lambda units: units.reshape(-1, units.numel() // tensor.shape[0], ROWS))


def _turned(tensor: Tensor, strips: Callable[[Tensor], Tensor]) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    source = strips(_units(tensor))
    _units(out).view(source.transpose(1, 2).shape).copy_(source.transpose(1, 2))
    return out


def _units(tensor: Tensor) -> Tensor:
    """What stays together, as one number; flat."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.int32) if tensor.dim() == 3 else flat
