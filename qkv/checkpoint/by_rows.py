"""A tensor quantized a few rows at a time, straight from its file: the same bytes in less memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qkv.checkpoint.shard_writer import row_slices
from qkv.checkpoint.source import Source
from qkv.errors import QkvError
from qkv.quantizers.format import Format
from qkv.quantizers.tensor import QuantizedTensor

Quantize = Callable[[Tensor], QuantizedTensor]


def has_rows_apart(format: Format, shape: tuple[int, ...]) -> bool:
    """Whether no row's codes and scales depend on another row."""
    return len(shape) > 1 and format.group_size != "tensor" and not format.double_quant


def quantized_rows(name: str, source: Source, format: Format, quantize: Quantize) -> Iterator[dict[str, Tensor]]:
    """The stored tensors of a weight, rows after rows along dimension 0.

    Args:
        name: of the tensor in the source, ``[..., out, in]``, and of what it becomes.
        source: where it lies.
        format: one with :func:`has_rows_apart`.
        quantize: what quantizes rows to that format.

    Raises:
        QkvError: what ``quantize`` says of the whole tensor.
    """
    entry = source.entries[name]
    for start, stop in row_slices(entry.shape, entry.dtype.itemsize):
        rows = source.read_rows(name, start, stop)
        try:
            made = quantize(rows).state(name)
        except QkvError:
            quantize(source.read(name))  # says the same with the place in the whole tensor
            raise
        made.pop(f"{name}_shape", None)
        yield made
    if "_shape" in format.layout(entry.shape):
        yield {f"{name}_shape": torch.tensor(entry.shape, dtype=torch.int64)}
