"""Our own CPU kernels: few rows straight from the stored codes, many by dequantized panels."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from qkv.quantizers.double_quant import dynamic_map
from qkv.quantizers.kernels import native
from qkv.quantizers.kernels.case import Case
from qkv.quantizers.kernels.ready import ReadyWeight
from qkv.quantizers.tensor import QuantizedTensor

SERVES = "every format on the CPU: few rows from the codes, many by panels; dequantization"
PANEL_NBYTES = 8 * 2**20
"""Scratch of a product of many rows: so much of the weight is dequantized at a time."""


def unavailable() -> str | None:
    """Why it is not live."""
    return native.unavailable()


def refuses(case: Case) -> str | None:
    """Why it cannot take a case."""
    if case.device != "cpu":
        return "runs on the CPU"
    if case.dtype not in native.DTYPES:
        return f"serves float32, bfloat16 and float16, not {case.dtype}"
    return None


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``; bfloat16 x multiplies in bfloat16, float32 and float16 x in float32.

    The environment variable ``QKV_EXACT=1`` makes it float32 for all.
    """
    columns = weight.shape[1]
    size = weight.format.group_length(columns)
    if x.shape[0] > native.most_rows(x.dtype) or (size % 16 and size < columns):
        return _by_panels(x, weight, bias)
    scale, zero = _scale(weight, weight.shape[0]), _spread(weight.zero, weight.shape[0])
    ready = ReadyWeight(weight.codes, scale, zero, kind=weight.format.name, in_features=columns, group_size=size)
    if ready.reads(weight):  # rather than a decoded copy of its scales
        weight.ready = ready
    return ready.linear(x, bias)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The float weight, bit for bit that of the reference."""
    rows, columns = prod(weight.shape[:-1]), weight.shape[-1]
    codes = weight.codes.reshape(rows, *weight.codes.shape[-2:])
    out = native.dequantize(
        codes,
        _scale(weight, rows),
        _spread(weight.zero, rows),
        kind=weight.format.name,
        in_features=columns,
        group_size=weight.format.group_length(columns),
        dtype=dtype,
    )
    return out.reshape(weight.shape)


def _by_panels(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    if native.EXACT and x.dtype != torch.float32:
        return _by_panels(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)
    rows, columns = weight.shape
    step = max(1, PANEL_NBYTES // max(columns * x.dtype.itemsize, 1))
    scale, zero = _scale(weight, rows), _spread(weight.zero, rows)
    panel = torch.empty((min(step, rows), columns), dtype=x.dtype)
    result = x.new_empty((x.shape[0], rows))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        values = native.dequantize(
            weight.codes[part],
            scale[part],
            None if zero is None else zero[part],
            kind=weight.format.name,
            in_features=columns,
            group_size=weight.format.group_length(columns),
            dtype=x.dtype,
            out=panel[: part.stop - start],
        )
        result[:, part] = torch.nn.functional.linear(x, values, None if bias is None else bias[part])
    return result


def _scale(weight: QuantizedTensor, rows: int) -> Tensor:
    scale = weight.scale
    if weight.scale_absmax is not None and weight.scale_offset is not None:
        values, limit = dynamic_map(weight.device), weight.format.scale_limit
        scale = native.decode_scale(scale, values, weight.scale_absmax, weight.scale_offset, limit)
    spread = _spread(scale, rows)
    assert spread is not None
    return spread


def _spread(values: Tensor | None, rows: int) -> Tensor | None:
    """One value for the whole tensor, repeated for each row; anything else as it is."""
    if values is None or values.numel() != 1:
        return values
    return values.reshape(1, 1).expand(rows, 1).contiguous()
