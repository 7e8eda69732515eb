"""Scales, codes and values of groups: the one switch over the number formats that quantizing needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkv.quantizers import integer, nf4
from qkv.quantizers.format import Format


class Range(NamedTuple):
    """Smallest and largest value of each group, ``float32 [rows, groups]``, with 0 between them."""

    low: Tensor
    high: Tensor


class Scales(NamedTuple):
    """``scale`` float32 ``[rows, groups]`` and, for asymmetric formats, ``zero`` uint8 of the same shape."""

    scale: Tensor
    zero: Tensor | None = None


def spanning_scales(ranges: Range, format: Format) -> Scales:
    """The scales under which the outer codes stand for the ends of each group's range."""
    if not format.symmetric:
        return Scales(*integer.asymmetric_scale(ranges.low, ranges.high, format.bits))
    absmax = torch.maximum(-ranges.low, ranges.high)
    return Scales(absmax if format.name == "nf4" else integer.symmetric_scale(absmax, format.bits))


def encode(groups: Tensor, scales: Scales, format: Format) -> Tensor:
    """The nearest code of each element of ``float32 [rows, groups, length]``, a byte each."""
    if format.name == "nf4":
        return nf4.encode(groups, scales.scale)
    return integer.encode(groups, scales.scale, scales.zero, format.bits)


def decode(codes: Tensor, scales: Scales, format: Format) -> Tensor:
    """The ``float32`` values of codes ``[rows, groups, length]``."""
    if format.name == "nf4":
        return nf4.decode(codes, scales.scale)
    return integer.decode(codes, scales.scale, scales.zero, format.bits)


def scales_of(scales: Scales, rows: slice, shape: torch.Size, format: Format) -> Scales:
    """The scales of some rows, whose groups are ``shape`` ``[rows, groups, length]``; a single one is spread."""
    if format.group_size == "tensor":
        return Scales(*(None if each is None else each.expand(shape[:2]) for each in scales))  # type: ignore[arg-type]
    return Scales(*(None if each is None else each[rows] for each in scales))  # type: ignore[arg-type]
