"""Ground floor: number formats, quantizers, the drop-in modules and their kernels. torch and numpy only."""

from __future__ import annotations

from qkv.quantizers.format import FORMATS, Format
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor

__all__ = ["FORMATS", "Format", "QuantizedTensor", "quantize_tensor"]
