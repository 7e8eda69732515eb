"""FloatLinear: ``nn.Linear`` of a bfloat16 weight that stays as it is, read as fast as memory goes.

torch's own bfloat16 product of a few rows reaches a third of the memory's bandwidth on a CPU, so that an output head
left in 16 bits takes longer than all the quantized layers of a small model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkv.quantizers.kernels import native


class FloatLinear(nn.Linear):
    """What :func:`qkv.prepare_` makes of an ``nn.Linear`` by a change of class; its parameters are not touched."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``; what the native library does not serve is torch's."""
        if self._is_served(input):
            return native.linear_bf16(input, self.weight, self.bias)
        return super().forward(input)

    def _is_served(self, x: Tensor) -> bool:
        weight, bias = self.weight, self.bias
        if not x.dtype == weight.dtype == torch.bfloat16 or torch.compiler.is_compiling():
            return False
        if not 0 < x.numel() <= native.FLOAT_ROWS * self.in_features or x.shape[-1] != self.in_features:
            return False
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return False
        if not (x.is_cpu and weight.is_cpu and weight.is_contiguous()):
            return False
        return (bias is None or bias.dtype == torch.bfloat16) and cannot_serve() is None


def cannot_serve() -> str | None:
    """Why no bfloat16 product is served here, in words for people; None when one is."""
    if (missing := native.unavailable()) is not None:
        return f"needs the native library: {missing}"
    if native.level() != "avx512" or native.EXACT:
        return f"needs AVX-512 with BF16 and no QKV_EXACT; in use is {native.level()}"
    return None
