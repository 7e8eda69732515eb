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
        if torch.compiler.is_compiling() or not (native.is_plain_bf16(x) and native.is_plain_bf16(weight)):
            return False
        if not 0 < x.numel() <= native.FLOAT_ROWS * self.in_features or x.shape[-1] != self.in_features:
            return False
        bias_fits = bias is None or bias.dtype == torch.bfloat16
        return weight.is_contiguous() and bias_fits and native.cannot_serve_bf16() is None
