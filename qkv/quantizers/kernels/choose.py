"""Which back end runs a product: a visible table, tried in order, the answer remembered."""

from __future__ import annotations

import os
from functools import cache
from math import prod
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.quantizers.kernels import bitsandbytes, native_cpu, reference, torch_int4, torch_int8, triton_linear
from qkv.quantizers.kernels.case import Case
from qkv.quantizers.tensor import QuantizedTensor

BACKENDS: Final[dict[str, ModuleType]] = {
    "native": native_cpu,
    "torch-int8": torch_int8,
    "torch-int4": torch_int4,
    "bitsandbytes": bitsandbytes,
    "triton": triton_linear,
    "reference": reference,
}
"""Back ends from the fastest to the one that always works. Each is a module with ``unavailable()``,
``refuses(case)``, ``linear(x, weight, bias)`` and ``dequantize(weight, dtype)`` or None."""

KERNELS_VARIABLE: Final = "QKV_KERNELS"
MANY_ROWS: Final = 64
"""No back end tells more rows than this apart, so the remembered choices stay few."""
NATIVE_LEVELS: Final = ("portable", "avx2", "avx512")


@cache
def choose(case: Case) -> ModuleType:
    """The first back end of the table that is live and takes ``case``.

    The environment variable ``QKV_KERNELS`` limits the table to one back end (and the reference), or the
    native one to an instruction set: ``portable``, ``avx2`` or ``avx512``.

    Raises:
        QkvError: the variable names neither.
    """
    forced = os.environ.get(KERNELS_VARIABLE)
    if forced and forced not in (*BACKENDS, *NATIVE_LEVELS):
        choices = ", ".join((*BACKENDS, *NATIVE_LEVELS))
        raise QkvError(f"{KERNELS_VARIABLE}={forced} is not a back end; choose from {choices}")
    for name, backend in BACKENDS.items():
        if forced in BACKENDS and name not in (forced, "reference"):
            continue
        if backend.unavailable() is None and backend.refuses(case) is None:
            return backend
    raise AssertionError("the reference takes every case")


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``[..., in]``, a float dtype; gradients flow to it.
        weight: quantized ``[out, in]``.
        bias: ``[out]`` or None, cast to x's dtype.

    Returns:
        ``[..., out]`` in x's dtype.
    """
    if torch.compiler.is_compiling():
        return _traced(x, weight, _cast(bias, x))
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return result
    return _forward(x, weight, bias)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The float weight in ``dtype``, bit for bit what the reference gives, by the fastest back end."""
    if torch.compiler.is_compiling():
        return reference.decode_whole(weight, dtype)
    case = Case(weight.format, weight.shape, weight.device.type, dtype, 0)
    result: Tensor = choose(case).dequantize(weight, dtype)
    return result


def _traced(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """For a graph: one operator where a GPU kernel serves it, otherwise plain torch to be traced and fused."""
    wants_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if not wants_grad and triton_linear.takes_traced(x, weight):
        return triton_linear.traced_linear(x, weight, bias)
    return torch.nn.functional.linear(x, reference.decode_whole(weight, x.dtype), bias)


def _forward(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    ready = weight.ready
    if ready is not None and ready.takes(x) and ready.reads(weight):
        return ready.linear(x, _cast(bias, x))
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features:
        raise QkvError(f"x has {x.shape[-1]} features and the weight takes {in_features}")
    flat = x.reshape(prod(x.shape[:-1]), in_features)
    rows = min(flat.shape[0], MANY_ROWS)
    backend = choose(Case(weight.format, weight.shape, x.device.type, x.dtype, rows))
    result: Tensor = backend.linear(flat, weight, _cast(bias, x))
    return result.reshape(*x.shape[:-1], out_features)


def _cast(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)


class _Linear(torch.autograd.Function):
    """The product with gradients; the weight is dequantized again for backward rather than kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:  # type: ignore[override]
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ dequantize(ctx.weight, grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_x, None, grad_bias
