"""torch's packed 4-bit product on the CPU: int4 in groups, and int8 as two halves of four bits.

``w = (q - 8) * scale + zero`` with scales and zeros in bfloat16. A code of eight bits is ``16 * high + low``:
two products, of scales ``16 s`` and ``s``. It needs a packed copy of the codes, as large as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.quantizers.kernels.case import Case
from qkv.quantizers.kernels.packed import packed
from qkv.quantizers.kernels.reference import dequantize as dequantize
from qkv.quantizers.packing import unpack_nibbles
from qkv.quantizers.tensor import QuantizedTensor

SERVES = "int4 and int8 in groups, bfloat16, few rows, CPU; keeps a second, packed copy of the codes"
GROUPS = (32, 64, 128, 256)
MAX_ROWS = {"int4": 8, "int8": 4}
"""With more rows, dequantizing once and multiplying is faster."""


def unavailable() -> str | None:
    """Why it is not live."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return f"torch {torch.__version__} has no _weight_int4pack_mm_for_cpu"
    return None


def refuses(case: Case) -> str | None:
    """Why it cannot take a case."""
    if case.format.name not in MAX_ROWS:
        return "serves int4 and int8"
    if case.device != "cpu" or case.dtype != torch.bfloat16:
        return "needs bfloat16 input on the CPU"
    if not 1 <= case.rows <= MAX_ROWS[case.format.name]:
        return f"serves 1 to {MAX_ROWS[case.format.name]} rows of {case.format.name}"
    rows, columns = case.shape
    size = case.format.group_length(columns)
    if size not in GROUPS or columns % size or rows % 16 or case.format.group_size == "tensor":
        return f"needs groups of {', '.join(map(str, GROUPS))} that divide the row, and rows in sixteens"
    return None


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``; scales are rounded to bfloat16."""
    size, parts = weight.format.group_length(weight.shape[1]), packed(weight, _pack)
    product, x = torch.ops.aten._weight_int4pack_mm_for_cpu, x.contiguous()
    result: Tensor = product(x, parts[0], size, parts[1])
    if len(parts) == 4:
        result = result + product(x, parts[2], size, parts[3])
    return result if bias is None else result + bias


def _pack(weight: QuantizedTensor) -> tuple[Tensor, ...]:
    """Codes and scales as the product takes them: one pair for int4, one for each half of int8."""
    scale = weight.float_scale().bfloat16().float()
    if weight.format.name == "int4":
        return _convert(unpack_nibbles(weight.codes)), _scales(scale, (8 - _zero_point(weight, 8)) * scale)
    codes = weight.codes.int() + (128 if weight.format.symmetric else 0)
    rest = (136 - _zero_point(weight, 128)) * scale
    coarse = rest.bfloat16().float()
    return _convert(codes >> 4), _scales(16 * scale, coarse), _convert(codes & 15), _scales(scale, rest - coarse)


def _zero_point(weight: QuantizedTensor, symmetric: int) -> Tensor | int:
    return symmetric if weight.zero is None else weight.zero.float()


def _convert(codes: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.flatten(1).int(), 1)
    return result


def _scales(scale: Tensor, zero: Tensor) -> Tensor:
    """``[rows, groups]`` each to ``bfloat16 [groups, rows, 2]``."""
    return torch.stack((scale.T, zero.T), dim=-1).bfloat16().contiguous()
