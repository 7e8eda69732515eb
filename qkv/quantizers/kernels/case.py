"""What the choice of a back end depends on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qkv.quantizers.format import Format


class Case(NamedTuple):
    """One kind of product. ``rows`` is the number of rows of x, 0 where a weight is only dequantized."""

    format: Format
    shape: tuple[int, ...]
    device: str
    dtype: torch.dtype
    rows: int
