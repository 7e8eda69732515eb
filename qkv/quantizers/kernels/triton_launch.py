"""Launching the Triton kernels of linear layers: sizes of tiles and grids for plain tensors."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from qkv.quantizers import nf4
from qkv.quantizers.kernels.triton_decode import decode
from qkv.quantizers.kernels.triton_few import add_parts, few_rows
from qkv.quantizers.kernels.triton_live import interpreted
from qkv.quantizers.kernels.triton_many import many_rows

KINDS: Final = {"int8": 0, "int4": 1, "nf4": 2}
PROGRAMS: Final = 1024
"""Programs that keep a GPU of some hundred multiprocessors busy; columns are split to get there."""


class Stored(NamedTuple):
    """A weight's tensors and sizes as the kernels take them.

    Args:
        codes: ``[out, groups, bytes of a group]``, contiguous. scale: float32 ``[out, groups]`` or one
            number; zero: uint8, likewise, or None.
        kind: ``"int8"``, ``"int4"`` or ``"nf4"``. columns: of the float weight. group: elements of a group.
        chunk: elements worked on at a time: a power of two that divides a group, or the row is one group.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    kind: str
    columns: int
    group: int
    chunk: int

    @property
    def features(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[0]

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes, scales, zero points and levels; what a kind has not is filled with what is never read."""
        return self.codes, self.scale, self.codes if self.zero is None else self.zero, nf4.levels(self.codes.device)

    def sizes(self) -> tuple[int, int, int, int]:
        """Features, columns, bytes of a row, scales of a row."""
        stride = 0 if self.scale.numel() == 1 else self.codes.shape[1]
        return self.features, self.columns, self.codes.shape[1] * self.codes.shape[2], stride

    @property
    def has_words(self) -> bool:
        """Whether 4-bit codes can be read four bytes at a time."""
        return self.kind == "int8" or (self.sizes()[2] % 4 == 0 and self.codes.data_ptr() % 4 == 0)

    def constants(self) -> dict[str, int | bool]:
        """What a kernel is compiled for."""
        return {"GROUP": self.group, "KIND": KINDS[self.kind], "ASYM": self.zero is not None}


def linear(x: Tensor, weight: Stored, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, ``[rows, out]`` in x's dtype; x ``[rows, in]``, contiguous."""
    rows, features = x.shape[0], weight.features
    out = x.new_empty((rows, features))
    if not out.numel():
        return out
    splits = _splits(x, weight)
    target, own_bias = out, bias
    if splits > 1:
        target, own_bias = x.new_empty((splits, rows, features), dtype=torch.float32), None
    run = _few if rows == 1 and weight.has_words else _many
    run(x, weight, own_bias, target, splits)
    if splits > 1:
        grid = (triton.cdiv(out.numel(), 1024),)
        known = out if bias is None else bias
        add_parts[grid](target, known, out, rows, features, SPLITS=splits, BIAS=bias is not None, SIZE=1024)
    return out


def dequantize(weight: Stored, dtype: torch.dtype) -> Tensor:
    """The float weight ``[out, in]``."""
    features, columns, *_ = weight.sizes()
    out = torch.empty((features, columns), dtype=dtype, device=weight.codes.device)
    if out.numel():
        size = 32 if not interpreted() else 128
        grid = (triton.cdiv(features, size), triton.cdiv(columns, weight.chunk))
        decode[grid](*weight.arguments(), out, *weight.sizes(), **weight.constants(), FEATURES=size, SIZE=weight.chunk)
    return out


FEATURES_OF_ONE_ROW: Final = 4
CHUNKS_BYTES: Final = 1024


def _few(x: Tensor, weight: Stored, bias: Tensor | None, out: Tensor, splits: int) -> None:
    grid = (triton.cdiv(weight.features, FEATURES_OF_ONE_ROW), splits)
    few_rows[grid](
        x,
        *weight.arguments(),
        x if bias is None else bias,
        out,
        *weight.sizes(),
        **weight.constants(),
        BIAS=bias is not None,
        CHUNK=weight.chunk,
        CHUNKS=_chunks(weight),
        FEATURES=FEATURES_OF_ONE_ROW,
        SPLITS=splits,
        num_warps=4,
    )


def _many(x: Tensor, weight: Stored, bias: Tensor | None, out: Tensor, splits: int) -> None:
    rows, features = _tile(x.shape[0])
    grid = (triton.cdiv(weight.features, features), triton.cdiv(x.shape[0], rows), splits)
    many_rows[grid](
        x,
        *weight.arguments(),
        x if bias is None else bias,
        out,
        x.shape[0],
        *weight.sizes(),
        **weight.constants(),
        BIAS=bias is not None,
        ROWS=rows,
        FEATURES=features,
        DEPTH=weight.chunk,
        SPLITS=splits,
        num_warps=8 if rows > 64 else 4,
        num_stages=3,
    )


def _tile(rows: int) -> tuple[int, int]:
    """Rows of x and features of the weight that one program multiplies."""
    if rows <= 16:
        return 16, 64
    if rows <= 64:
        return int(triton.next_power_of_2(rows)), 64
    return (128, 128) if rows <= 256 else (256, 128)


def _chunks(weight: Stored) -> int:
    """Chunks of a row that one program works on at a time."""
    wanted = CHUNKS_BYTES * (1 if weight.kind == "int8" else 2) // weight.chunk
    return min(wanted, int(triton.next_power_of_2(triton.cdiv(weight.columns, weight.chunk))))


def _splits(x: Tensor, weight: Stored) -> int:
    """Parts into which the columns are cut, so that small products occupy the GPU too."""
    rows = x.shape[0]
    if rows == 1 and weight.has_words:
        programs, steps = triton.cdiv(weight.features, FEATURES_OF_ONE_ROW), weight.chunk * _chunks(weight)
    else:
        tile_rows, features = _tile(rows)
        programs, steps = triton.cdiv(weight.features, features) * triton.cdiv(rows, tile_rows), 4 * weight.chunk
    wanted = PROGRAMS // max(programs, 1) if rows <= 64 else 1
    return max(1, min(int(wanted), int(triton.cdiv(weight.columns, steps)), 16))
