"""NormalFloat 4: the 16 levels of QLoRA (Dettmers et al. 2023, arXiv 2305.14314), absmax scaling."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

LEVELS: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The published levels as bitsandbytes stores them in float32. They are constants on purpose: computing
them again from normal quantiles differs in the last bits."""

ZERO_CODE: Final = 7
SMALLEST_DIVISOR = 1e-38
"""bitsandbytes clamps the divisor here; below it, groups are scaled up first so that they stay right."""


@cache
def levels(device: torch.device) -> Tensor:
    """The 16 levels, ``float32 [16]``, on a device."""
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


@cache
def midpoints(device: torch.device) -> Tensor:
    """The 15 values half way between neighbouring levels, ``float32 [15]``, on a device."""
    table = levels(torch.device("cpu"))
    return ((table[1:] + table[:-1]) / 2).to(device)


def encode(groups: Tensor, absmax: Tensor) -> Tensor:
    """Nearest level of each element.

    Args:
        groups: ``float32 [rows, groups, length]``, finite.
        absmax: ``float32 [rows, groups]``, the largest magnitude of each group.

    Returns:
        Codes ``uint8 [rows, groups, length]``, 0…15. A group of zeros gets the code of the level 0.
    """
    small = absmax < SMALLEST_DIVISOR
    if small.any():
        lift = torch.where(small, 2.0**64, 1.0)
        groups, absmax = groups * lift[..., None], absmax * lift
    inverse = 1.0 / absmax.clamp(min=SMALLEST_DIVISOR)
    scaled = (groups * inverse[..., None]).clamp(-1, 1).contiguous()
    if scaled.device.type != "cpu":
        return torch.bucketize(scaled, midpoints(groups.device), out_int32=True).to(torch.uint8)
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for midpoint in midpoints(groups.device).tolist():  # 15 passes take a third of the time of bucketize
        codes += scaled > midpoint
    return codes


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """``float32`` values of codes ``[rows, groups, length]`` under scales ``[rows, groups]``."""
    return levels(codes.device)[codes.to(torch.int32)] * scale[..., None]
