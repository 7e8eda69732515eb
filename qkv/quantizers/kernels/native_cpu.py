"""Our own CPU kernels, which read the stored codes as they are: few rows directly, many by panels."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.quantizers.kernels.case import Case
from qkv.quantizers.tensor import QuantizedTensor

SERVES = "all formats on the CPU: products of few rows, panels for many, dequantization"


def unavailable() -> str | None:
    return "not built yet"


def refuses(case: Case) -> str | None:
    return "not built yet"


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    raise AssertionError


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    raise AssertionError
