"""Weights interleaved by sixteen output features: the order in which several rows of x are multiplied fastest.

Of sixteen rows of codes, the first four bytes of each come first, then the next four of each, and so on; scales and
zero points likewise, one of each row at a time. The bytes and their number stay the same, so that an interleaved tensor
can take the place of the stored one in memory.
"""

from __future__ import annotations

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
    units = _units(tensor)
    return _like(units.reshape(-1, ROWS, units.shape[1]).transpose(1, 2), tensor)


def in_order(tensor: Tensor) -> Tensor:
    """Undo :func:`interleaved`."""
    units = _units(tensor)
    return _like(units.reshape(-1, units.shape[1], ROWS).transpose(1, 2), tensor)


def _units(tensor: Tensor) -> Tensor:
    """``[out, units]``: what stays together, as one number."""
    rows = tensor.contiguous().view(tensor.shape[0], -1)
    return rows.view(torch.int32) if tensor.dim() == 3 else rows


def _like(units: Tensor, tensor: Tensor) -> Tensor:
    return units.reshape(tensor.shape[0], -1).view(tensor.dtype).view(tensor.shape)
