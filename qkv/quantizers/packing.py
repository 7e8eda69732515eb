"""Two 4-bit codes a byte, the first of a pair in the high nibble (as bitsandbytes stores NF4)."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes 0…15, ``uint8 [..., n]``, into ``uint8 [..., ceil(n / 2)]``; an odd end is padded with 0."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[..., 0::2] << 4) | codes[..., 1::2]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo :func:`pack_nibbles`: ``uint8 [..., n]`` to ``uint8 [..., 2 n]``."""
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)


def pack_crumbs(codes: Tensor) -> Tensor:
    """Pack codes 0…3, ``uint8 [..., n]``, into ``uint8 [..., ceil(n / 4)]``, the first in the high bits."""
    missing = -codes.shape[-1] % 4
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    return (codes[..., 0::4] << 6) | (codes[..., 1::4] << 4) | (codes[..., 2::4] << 2) | codes[..., 3::4]


def unpack_crumbs(packed: Tensor) -> Tensor:
    """Undo :func:`pack_crumbs`: ``uint8 [..., n]`` to ``uint8 [..., 4 n]``."""
    parts = (packed >> 6, (packed >> 4) & 3, (packed >> 2) & 3, packed & 3)
    return torch.stack(parts, dim=-1).flatten(-2)
