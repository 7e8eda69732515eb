"""torch's own INT8 product on the CPU: one scale a row, bfloat16 input, no second copy of the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.quantizers.kernels.case import Case
from qkv.quantizers.kernels.reference import dequantize as dequantize
from qkv.quantizers.tensor import QuantizedTensor

SERVES = "int8:row, bfloat16, up to 16 rows, CPU"
MAX_ROWS = 16
"""With more rows, dequantizing once and multiplying is faster."""


def unavailable() -> str | None:
    """Why it is not live."""
    if not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        return f"torch {torch.__version__} has no _weight_int8pack_mm"
    return None


def refuses(case: Case) -> str | None:
    """Why it cannot take a case."""
    if case.device != "cpu" or case.dtype != torch.bfloat16:
        return "needs bfloat16 input on the CPU"
    if not 1 <= case.rows <= MAX_ROWS:
        return f"serves 1 to {MAX_ROWS} rows"
    if case.shape[-1] % 32 or not case.shape[-1]:
        return "reads past the end of rows that are no multiple of 32"
    format = case.format
    if format.name != "int8" or format.group_size != "row" or not format.symmetric or format.double_quant:
        return "serves int8:row alone"
    return None


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``; the scales are multiplied in float32 afterwards, so that none is rounded."""
    ones = torch.ones(weight.shape[0], dtype=x.dtype)
    product = torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight.codes[:, 0], ones)
    result: Tensor = (product.float() * weight.scale[:, 0]).to(x.dtype)
    return result if bias is None else result + bias
