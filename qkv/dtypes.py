"""Floating-point dtypes by their names."""

from __future__ import annotations

import torch

from qkv.errors import QkvError


def dtype_named(name: str) -> torch.dtype:
    """``"bfloat16"`` as ``torch.bfloat16``.

    Raises:
        QkvError: not a floating-point dtype of torch.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise QkvError(f"{name!r} is not a floating-point dtype; take float32, bfloat16 or float16")
    return dtype
