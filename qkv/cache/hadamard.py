"""A fixed rotation that spreads outliers over all channels: the normalised Hadamard matrix."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def matrix(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Orthogonal ``[dim, dim]``: Hadamard blocks of the largest power of two that divides ``dim``."""
    size = dim & -dim
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    full = torch.kron(torch.eye(dim // size, dtype=torch.float64), block / size**0.5)
    return full.to(device=device, dtype=dtype)


def spread(x: Tensor) -> Tensor:
    """Rotate ``[..., dim]``. The matrix is symmetric: doing it twice gives ``x`` back."""
    return x @ matrix(x.shape[-1], x.dtype, x.device)
