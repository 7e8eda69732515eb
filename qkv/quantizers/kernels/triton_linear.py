"""Our Triton kernels for a GPU: one row straight from the codes, more rows by tensor cores, dequantization.

Not measured on a GPU yet: held to the reference by Triton's interpreter, and compiled for sm_90, by the tests.
Called directly in eager mode. In a graph of ``torch.compile`` it is ``torch.ops.qkv.linear``, an operator with
a fake kernel, so that the graph holds the product as one node and not the decoding of the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv.quantizers.kernels import triton_live
from qkv.quantizers.kernels.case import Case
from qkv.quantizers.tensor import QuantizedTensor

if TYPE_CHECKING:
    from qkv.quantizers.kernels.triton_launch import Stored

SERVES = "every format on CUDA in groups of a multiple of 16: products of any number of rows; dequantization"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_CHUNK = 64


def unavailable() -> str | None:
    """Why it is not live."""
    return triton_live.unavailable()


def refuses(case: Case) -> str | None:
    """Why it cannot take a case."""
    if case.device != triton_live.device_type():
        return "runs on CUDA"
    if case.dtype not in DTYPES or (case.rows and len(case.shape) != 2):
        return "serves 2-D weights in float32, bfloat16 and float16"
    size, columns = case.format.group_length(case.shape[-1]), case.shape[-1]
    if size % 16 and size < columns:
        return f"groups of {size} are no multiple of 16"
    return None


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float32; many rows of 16 bits meet a weight rounded to their dtype."""
    return _product(x, stored(weight), bias)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The float weight, bit for bit that of the reference."""
    from qkv.quantizers.kernels import triton_launch

    return triton_launch.dequantize(stored(weight), dtype).reshape(weight.shape)


def stored(weight: QuantizedTensor) -> Stored:
    """The weight as the kernels take it; scales in 8 bits are decoded first."""
    from qkv.quantizers.kernels.triton_launch import Stored

    columns = weight.shape[-1]
    codes = weight.codes.reshape(-1, *weight.codes.shape[-2:])
    group = weight.format.group_length(columns)
    return Stored(codes, weight.float_scale(), weight.zero, weight.format.name, columns, group, _chunk(group, columns))


def takes_traced(x: Tensor, weight: QuantizedTensor) -> bool:
    """Whether a graph may hold the product as :func:`traced_linear`."""
    if not _live() or x.dtype not in DTYPES or x.device.type != _device_type():
        return False
    size = weight.format.group_length(weight.shape[-1])
    return size % 16 == 0 or size >= weight.shape[-1]


def traced_linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """The product as one operator of a graph; x ``[..., in]``."""
    group = weight.format.group_length(weight.shape[-1])
    name, columns = weight.format.name, weight.shape[-1]
    scale = weight.float_scale()
    result: Tensor = torch.ops.qkv.linear(x, weight.codes, scale, weight.zero, bias, name, columns, group)
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _live() -> bool:
    return unavailable() is None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_type() -> str:
    return triton_live.device_type()


def _chunk(group: int, columns: int) -> int:
    """Elements of one group to work on at a time: a power of two."""
    return MAX_CHUNK if group >= columns else min(MAX_CHUNK, group & -group)


def _product(x: Tensor, weight: Stored, bias: Tensor | None) -> Tensor:
    from qkv.quantizers.kernels import triton_launch

    if x.dtype == torch.float32 and x.shape[0] > 1:  # tensor cores would round float32
        return torch.nn.functional.linear(x, triton_launch.dequantize(weight, x.dtype), bias)
    return triton_launch.linear(x.contiguous(), weight, bias)


@torch.library.custom_op(
    "qkv::linear",
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? bias, str kind, int columns, int group)"
    " -> Tensor",
)
def _operator(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    kind: str,
    columns: int,
    group: int,
) -> Tensor:
    from qkv.quantizers.kernels.triton_launch import Stored

    weight = Stored(codes, scale, zero, kind, columns, group, _chunk(group, columns))
    return _product(x.reshape(-1, columns), weight, bias).reshape(*x.shape[:-1], codes.shape[0])


@_operator.register_fake
def _fake(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    kind: str,
    columns: int,
    group: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))
