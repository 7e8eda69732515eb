"""bitsandbytes' NF4 kernels, which read our codes as they are stored.

On CUDA both the product of one row and the dequantization run in its kernels. On the CPU its product of few
rows needs AVX-512 with BF16 and a packed copy of the weight with scales rounded to bfloat16; where it does
not serve, the weight is dequantized.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qkv.quantizers import nf4
from qkv.quantizers.kernels import triton_live
from qkv.quantizers.kernels.case import Case
from qkv.quantizers.kernels.packed import packed
from qkv.quantizers.tensor import QuantizedTensor

SERVES = "nf4: dequantization; one row on CUDA; few rows in bfloat16 on the CPU, with a packed copy of the codes"
MAX_ROWS = 16
"""Of the fused product on the CPU; with more, dequantizing once and multiplying is faster."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def unavailable() -> str | None:
    """Why it is not live."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "not installed: pip install bitsandbytes"
    try:
        _functional()
    except Exception as error:  # a broken install raises whatever its loader raises
        return f"does not import: {error}"
    return None


@cache
def _functional() -> Any:
    import logging

    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of an optional download that this library does not use
    try:
        import bitsandbytes.functional as functional
    finally:
        logger.setLevel(level)
    return functional


def refuses(case: Case) -> str | None:
    """Why it cannot take a case."""
    format, columns = case.format, case.shape[-1]
    if format.name != "nf4":
        return "serves nf4 alone"
    size = format.group_length(columns)
    if size not in (64, 128, 256, 512, 1024) or columns % size:
        return f"its blocks run on over the ends of rows of {columns} that groups of {size} do not divide"
    if case.dtype not in _DTYPES or len(case.shape) != 2:
        return "serves 2-D weights in float32, bfloat16 and float16"
    if case.device not in ("cpu", "cuda"):
        return f"has no kernel on {case.device}"
    if case.device == "cuda" and case.rows > 1 and triton_live.unavailable() is None:
        return "dequantizes the whole weight for more than one row, which the Triton kernels do not (not measured)"
    return None


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``."""
    if x.device.type == "cpu" and 1 <= x.shape[0] <= MAX_ROWS and x.dtype == torch.bfloat16 and _fused(weight):
        codes, absmax = packed(weight, _pack)
        size = weight.format.group_length(weight.shape[1])
        product: Tensor = torch.ops.bitsandbytes.gemv_4bit(
            x.contiguous(), codes, weight.shape, absmax, nf4.levels(x.device), size
        )
        return product if bias is None else product + bias
    if x.device.type == "cuda" and x.shape[0] == 1:
        levels, size = nf4.levels(x.device), weight.format.group_length(weight.shape[1])
        codes, absmax = weight.codes.reshape(-1, 1), weight.float_scale().reshape(-1)
        result: Tensor = torch.ops.bitsandbytes.gemv_4bit(x, codes, weight.shape, absmax, levels, size)
        return result if bias is None else result + bias
    return torch.nn.functional.linear(x, dequantize(weight, x.dtype), bias)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The float weight in ``dtype``."""
    _functional()
    size = weight.format.group_length(weight.shape[1])
    codes, absmax = weight.codes.reshape(-1, 1), weight.float_scale().reshape(-1)
    result: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, absmax, size, "nf4", weight.shape, dtype)
    return result


@cache
def _has_fused_product() -> bool:
    return bool(_functional().has_avx512bf16())


def _fused(weight: QuantizedTensor) -> bool:
    return weight.shape[0] % 32 == 0 and _has_fused_product()


def _pack(weight: QuantizedTensor) -> tuple[Tensor, ...]:
    """The codes in its layout of 32 rows side by side, and its scales."""
    functional, size = _functional(), weight.format.group_length(weight.shape[1])
    state = functional.QuantState(
        absmax=weight.float_scale(),
        shape=torch.Size(weight.shape),
        blocksize=size,
        quant_type="nf4",
        dtype=torch.bfloat16,
    )
    codes, state = functional._convert_weight_packed_for_cpu(weight.codes, state)
    return codes, state.absmax
