"""Quantizing rows on a GPU: what :mod:`triton_encode` is given, and what comes back."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qkv.quantizers import integer, nf4
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import triton_live

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
MAX_GROUP: Final = 4096
PROGRAM_ELEMENTS: Final = 2048


def refuses(x: Tensor, format: Format) -> str | None:
    """Why the rows ``x [out, in]`` cannot be quantized to ``format`` here."""
    if triton_live.unavailable() is not None:
        return triton_live.unavailable()
    if x.device.type != triton_live.device_type() or x.dtype not in DTYPES:
        return "serves float32, bfloat16 and float16 on CUDA"
    if format.group_size == "tensor" or format.group_length(x.shape[1]) > MAX_GROUP or not x.numel():
        return f"serves groups of up to {MAX_GROUP} elements"
    if format.double_quant and format.name != "nf4":
        return "integer codes are chosen for scales that are rounded first"
    return None


def quantize(x: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes, scales and zero points of rows ``x [out, in]``, bit for bit those of the reference formulas.

    Returns:
        ``codes [out, groups, bytes of a group]``, float32 ``scale [out, groups]`` (the absmax for nf4) and
        uint8 ``zero`` or None; or None alone when x holds NaN or infinity.
    """
    import triton

    from qkv.quantizers.kernels.triton_encode import encode
    from qkv.quantizers.kernels.triton_launch import KINDS

    rows, columns = x.shape
    group = format.group_length(columns)
    groups, width = triton.cdiv(columns, group), max(2, triton.next_power_of_2(group))
    group_bytes = group if format.bits == 8 else triton.cdiv(group, 2)
    signed = format.bits == 8 and format.symmetric
    codes = x.new_empty((rows, groups, group_bytes), dtype=torch.int8 if signed else torch.uint8)
    scale = x.new_empty((rows, groups), dtype=torch.float32)
    zero = None if format.symmetric else x.new_empty((rows, groups), dtype=torch.uint8)
    together = max(1, PROGRAM_ELEMENTS // width)
    steps = 2**format.bits - 1 if zero is not None else 2 ** (format.bits - 1) - 1
    encode[(triton.cdiv(rows * groups, together),)](
        x.contiguous(), codes, scale, codes if zero is None else zero, nf4.midpoints(x.device),
        rows, columns, groups, group_bytes,
        GROUP=group, WIDTH=width, GROUPS=together, KIND=KINDS[format.name], ASYM=zero is not None,
        QMAX=float(steps), TINY=float(torch.finfo(torch.float32).tiny), LIMIT=format.scale_limit,
        SHRINK=integer.SHRINK, SMALLEST=nf4.SMALLEST_DIVISOR,
        enable_fp_fusion=False,
    )  # fmt: skip
    return (codes, scale, zero) if bool(torch.isfinite(scale).all()) else None
