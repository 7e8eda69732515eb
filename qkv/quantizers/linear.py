"""QuantizedLinear: the drop-in for ``nn.Linear`` (and for GPT-2's ``Conv1D``, whose weight it holds transposed)."""

from __future__ import annotations

from torch import Tensor, nn

from qkv.quantizers import kernels
from qkv.quantizers.prepared import Prepared


class QuantizedLinear(Prepared, nn.Linear):
    """``y = x @ weight.T + bias`` with a quantized weight ``[out_features, in_features]``.

    Gradients flow to the input and the bias; the weight is not trained. The output has x's dtype.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in input's dtype."""
        if self.prepared and (strips := self.strips(input)) is not None:
            return strips.linear(input, self.bias)
        return kernels.linear(input, self.quantized(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.specs['weight'].format}"
