"""compressed-tensors ``pack-quantized``: INT4 and INT8 groups, as vLLM, SGLang and transformers load them.

A code plus half its range, packed into int32 along the input dimension, the first in the lowest bits; one
scale a group in the weight's own dtype (compressed-tensors 0.20, ``PackedQuantizationCompressor``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from qkv.checkpoint.layouts.base import Layout, Plan, Stored, Weight
from qkv.checkpoint.layouts.ct_groups import config_groups, ignored, refuse_split
from qkv.checkpoint.layouts.ct_reading import decode_packed, read_formats, stored_packed
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import TensorSpec
from qkv.errors import QkvError
from qkv.integration.settings import Settings
from qkv.quantizers.format import Format
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor

GROUPS: Final = (32, 64, 128, "row")
"""Group sizes that the kernels of vLLM and SGLang take."""
SCALE_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class CompressedTensors(Layout):
    """``quant_method: compressed-tensors``."""

    method = "compressed-tensors"

    def check(self, settings: Settings) -> None:
        """Symmetric integers in groups that servers take, and no embeddings."""
        if settings.embeddings is not None:
            raise QkvError(
                f"the compressed-tensors layout keeps embedding tables and heads as they are, for servers do not "
                f"load them otherwise; leave out embeddings ({settings.embeddings})"
            )
        for format in (settings.format, *settings.overrides.values()):
            if isinstance(format, Format):
                _check_format(format)

    def unfit(self, weight: Weight) -> str | None:
        """Linear layers, and experts that lie in the file one by one."""
        if weight.transposed:
            return "compressed-tensors knows nn.Linear, not Conv1D with its transposed weight"
        return None if len(weight.shape) == 2 else "compressed-tensors holds experts one by one, not stacked"

    def specs(self, weight: Weight) -> list[TensorSpec]:
        """Packed codes, scales, shape."""
        _check_shape(weight)
        rows, columns = weight.shape
        groups = columns // weight.format.group_length(columns)
        return [
            TensorSpec(f"{weight.name}_packed", torch.int32, (rows, columns * weight.format.bits // 32)),
            TensorSpec(f"{weight.name}_scale", _scale_dtype(weight.dtype), (rows, groups)),
            TensorSpec(f"{weight.name}_shape", torch.int64, (2,)),
        ]

    def encode(self, weight: Weight, value: Tensor, importance: Tensor | None) -> dict[str, Tensor]:
        """Scales are rounded to their dtype first, and codes chosen for the rounded ones."""
        dtype = _scale_dtype(weight.dtype)
        found = quantize_tensor(value, weight.format, importance=importance, name=weight.name, scale_dtype=dtype)
        return {
            f"{weight.name}_packed": _pack(found.codes, weight.format.bits).reshape(weight.shape[0], -1),
            f"{weight.name}_scale": found.scale.to(dtype),
            f"{weight.name}_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }

    def config(self, plan: Plan) -> dict[str, Any]:
        """One config group a format."""
        refuse_split(plan)
        return {
            "quant_method": self.method,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": config_groups(plan),
            "ignore": ignored(plan),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def stored(self, source: Source, config: Mapping[str, Any]) -> list[Stored]:
        """Quantized is what is packed."""
        return stored_packed(source, read_formats(source, config), self)

    def decode(self, stored: Stored, source: Source) -> QuantizedTensor:
        """The same codes in our order."""
        return decode_packed(stored, source)


def _check_format(format: Format) -> None:
    if format.name == "nf4":
        raise QkvError(f"compressed-tensors has no {format}; take int4 or int8, or the layout bnb for nf4")
    if not format.symmetric:
        raise QkvError(
            f"{format} is asymmetric, which transformers with compressed-tensors 0.20 refuses to load (the shapes of "
            "packed zero points do not match); take the symmetric one"
        )
    if format.double_quant:
        raise QkvError(f"compressed-tensors has no scales in 8 bits; take {format.name} without double")
    if format.group_size not in GROUPS:
        raise QkvError(
            f"groups of {format} are not served: the kernels of vLLM take {', '.join(map(str, GROUPS))}; "
            f"take {format.name}:g64, say"
        )


def _check_shape(weight: Weight) -> None:
    columns, format = weight.shape[1], weight.format
    if format.group_size not in GROUPS or columns % format.group_length(columns) or columns * format.bits % 32:
        module = weight.name.removesuffix(".weight")
        sizes = [size for size in GROUPS if isinstance(size, int) and columns % size == 0]
        remedy = f"{format.name}:g{sizes[-1]}" if sizes else "keep"
        raise QkvError(
            f"{weight.name} has {columns} inputs, and {format} does not divide them into whole groups of "
            f"{', '.join(map(str, GROUPS))}, as compressed-tensors and its kernels demand; "
            f"give it another format: --override {module}={remedy}"
        )


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in SCALE_DTYPES else torch.float32


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Our codes ``[rows, groups, bytes]`` as int32: the nibbles of a byte change places, INT8 loses its sign."""
    if bits == 4:
        swapped = (codes << 4) | (codes >> 4)
        return swapped.contiguous().view(torch.int32)
    return (codes.view(torch.uint8) ^ 128).contiguous().view(torch.int32)
