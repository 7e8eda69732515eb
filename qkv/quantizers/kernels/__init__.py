"""Products with quantized weights: one file a back end, and :mod:`choose`, which picks among them."""

from __future__ import annotations

from qkv.quantizers.kernels.choose import BACKENDS, dequantize, linear
from qkv.quantizers.kernels.status import BackendStatus, status

__all__ = ["BACKENDS", "BackendStatus", "dequantize", "linear", "status"]
