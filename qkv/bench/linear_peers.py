"""What else multiplies with quantized weights on this machine: torch's packed products and other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from qkv.bench.linear import Candidate, Product, cold
from qkv.quantizers.kernels import bitsandbytes as bitsandbytes_kernels

GROUP: Final = 64


def torch_int8(weight: Tensor) -> Candidate | None:
    """torch's packed int8: one scale a row."""
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)

    def make() -> Product:
        copy, scales = codes.clone(), scale.bfloat16()
        return lambda x: torch.ops.aten._weight_int8pack_mm(x, copy, scales)

    return cold("torch int8 a row", codes.numel(), make)


def torch_int4(weight: Tensor) -> Candidate | None:
    """torch's packed int4: scale and zero point in bf16 a group."""
    rows, columns = weight.shape
    if rows % 16 or columns % GROUP:
        return None
    groups = weight.view(rows, -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    codes = ((groups / scale).round() + 8).to(torch.int32).view(rows, columns)
    parts = torch.stack((scale[..., 0], torch.zeros_like(scale[..., 0])), -1).transpose(0, 1).contiguous().bfloat16()

    def make() -> Product:
        packed, scales = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2), parts.clone()
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)

    return cold("torch int4 g64", codes.numel() // 2 + parts.nbytes, make)


def bitsandbytes_nf4(weight: Tensor) -> Candidate | None:
    """bitsandbytes' ``Linear4bit`` in evaluation mode."""
    if bitsandbytes_kernels.unavailable() is not None:
        return None
    import bitsandbytes

    def make() -> Product:
        layer = bitsandbytes.nn.Linear4bit(
            weight.shape[1], weight.shape[0], bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        layer.weight = bitsandbytes.nn.Params4bit(weight.bfloat16(), requires_grad=False, quant_type="nf4").to("cpu")
        product: Product = layer.eval().requires_grad_(False)
        product(torch.zeros(1, weight.shape[1], dtype=torch.bfloat16))  # its first call packs the weight anew
        return product

    return cold("bitsandbytes nf4", weight.numel() * 9 // 16, make)


def quanto(weight: Tensor) -> Candidate | None:
    """optimum-quanto's int8, one scale a row."""
    if not installed("optimum.quanto"):
        return None
    from optimum.quanto import freeze, qint8, quantize

    def patch(layer: nn.Module) -> None:
        quantize(layer, weights=qint8)
        freeze(layer)

    return _patched("quanto int8", weight, weight.numel(), patch)


def torchao(weight: Tensor) -> Candidate | None:
    """torchao's int8, weights alone."""
    if not installed("torchao"):
        return None
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    return _patched("torchao int8", weight, weight.numel(), lambda layer: quantize_(layer, Int8WeightOnlyConfig()))


def hqq(weight: Tensor) -> Candidate | None:
    """hqq's int4 by groups."""
    if not installed("hqq"):
        return None
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    layer = HQQLinear(
        _linear(weight),
        BaseQuantizeConfig(nbits=4, group_size=GROUP),
        compute_dtype=torch.bfloat16,
        device="cpu",
        initialize=True,
    )
    return Candidate("hqq int4 g64, one copy", weight.numel() // 2, layer)


PEERS: Final[tuple[Callable[[Tensor], Candidate | None], ...]] = (
    torch_int8,
    torch_int4,
    bitsandbytes_nf4,
    quanto,
    torchao,
    hqq,
)
"""Each makes a candidate of a float weight, or None where it is not installed or does not take the shape."""


def installed(name: str) -> bool:
    """Whether a package can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16, device="meta")
    layer.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
    return layer


def _patched(name: str, weight: Tensor, nbytes: int, patch: Callable[[nn.Module], Any]) -> Candidate:
    def make() -> Product:
        layer = nn.Sequential(_linear(weight))
        patch(layer)
        return layer

    return cold(name, nbytes, make)
