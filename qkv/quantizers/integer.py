"""INT8 and INT4: one rule for both, symmetric (absmax) or with a zero point a group.

Symmetric codes are ``-qmax … qmax`` with ``scale = absmax / qmax`` (127 or 7). Asymmetric codes are
``0 … 2**bits - 1`` over a range that always contains 0, so that the zero point is itself a code and a
group of one sign cannot push it out of range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.quantizers.format import Format

_FLOAT32 = torch.finfo(torch.float32)
SHRINK = 1 - 2.0**-20
"""An asymmetric scale is this much smaller than range / qmax: when the zero point falls half way between
two codes, both ends of the range then still land on the outer codes, and quantizing again changes nothing."""


def symmetric_scale(absmax: Tensor, bits: int) -> Tensor:
    """``absmax / qmax``, kept normal and small enough that ``qmax * scale`` is finite; 0 for a zero group."""
    qmax = 2 ** (bits - 1) - 1
    limit = Format("int8" if bits == 8 else "int4").scale_limit
    scale = (absmax / qmax).clamp(min=_FLOAT32.tiny, max=limit)
    return torch.where(absmax > 0, scale, 0.0)


def asymmetric_scale(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point of groups with smallest value ``low <= 0`` and largest ``high >= 0``.

    Returns:
        ``scale`` float32 and ``zero`` uint8, both of the inputs' shape.
    """
    qmax = 2**bits - 1
    scale = ((high / qmax - low / qmax) * SHRINK).clamp(min=_FLOAT32.tiny)
    scale = torch.where(high > low, scale, 0.0)
    return scale, zero_point(low, scale, bits)


def zero_point(low: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The code of 0 when the smallest value of the range is ``low``; ``uint8``."""
    return torch.round(-low / _divisor(scale)).clamp(0, 2**bits - 1).to(torch.uint8)


def encode(groups: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """Nearest code of each element.

    Args:
        groups: ``float32 [rows, groups, length]``, finite.
        scale: ``float32 [rows, groups]``.
        zero: ``uint8 [rows, groups]``, or None for the symmetric rule.
        bits: 8 or 4.

    Returns:
        ``int8`` codes for symmetric INT8; otherwise ``uint8``, symmetric INT4 being shifted by 8.
    """
    codes = torch.round(groups / _divisor(scale)[..., None])
    if zero is not None:
        return (codes + zero[..., None]).clamp_(0, 2**bits - 1).to(torch.uint8)
    qmax = 2 ** (bits - 1) - 1
    codes = codes.clamp_(-qmax, qmax)
    return codes.to(torch.int8) if bits == 8 else (codes + 2 ** (bits - 1)).to(torch.uint8)


def decode(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """``float32`` values of codes ``[rows, groups, length]``; finite for every code."""
    values = codes.to(torch.float32)
    if zero is not None:
        values = (values - zero[..., None].to(torch.float32)) * scale[..., None]
        return values.clamp_(_FLOAT32.min, _FLOAT32.max)
    if bits != 8:
        values = values - 2 ** (bits - 1)
    return values * scale[..., None]


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)
