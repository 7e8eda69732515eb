"""Floating-point dtypes by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The model's float dtype by its ``config.json``; bfloat16 where none is named."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str):
            return dtype_named(name)
    return torch.bfloat16
