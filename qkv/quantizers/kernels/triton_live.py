"""Whether Triton kernels can run here, and how: compiled on a GPU, or interpreted on the CPU for tests."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Final

import torch

CAPABILITY: Final = (8, 0)
"""The first generation whose tensor cores multiply bfloat16."""


@cache
def interpreted() -> bool:
    """Whether ``TRITON_INTERPRET=1`` makes kernels run in numpy, on tensors of the CPU: very slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def unavailable() -> str | None:
    """Why no kernel can run; None where one can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it comes with torch for CUDA)"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        return f"{torch.cuda.get_device_name()} has compute capability {found}; the kernels need 8.0"
    return None


def device_type() -> str:
    """Where the tensors of a kernel have to be."""
    return "cpu" if interpreted() else "cuda"
