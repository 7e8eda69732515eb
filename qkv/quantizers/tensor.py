"""QuantizedTensor: codes, scales and what they mean; and the one function that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.quantizers import integer, nf4
from qkv.quantizers.double_quant import NestedScale, decode_scale
from qkv.quantizers.format import Format
from qkv.quantizers.grouping import from_groups, row_chunks
from qkv.quantizers.packing import unpack_nibbles

if TYPE_CHECKING:
    from qkv.quantizers.kernels.ready import ReadyWeight


@dataclass(eq=False, slots=True)
class QuantizedTensor:
    """A weight in a quantized format: plain tensors and what they stand for.

    Attributes:
        format: the number format.
        shape: shape of the float weight, ``[..., out, in]``.
        dtype: dtype of the float weight; the default of :meth:`dequantize`.
        codes: ``[..., out, groups, bytes of a group]``, see :meth:`Format.layout`.
        scale: float32 ``[..., out, groups]``, or 8-bit codes of it under double quantization.
        zero: uint8 ``[..., out, groups]`` for asymmetric formats.
        scale_absmax, scale_offset: second-level scales under double quantization.
        packed: a copy in the layout of a kernel that needs one, see :mod:`qkv.quantizers.kernels.packed`; not
            part of :attr:`nbytes`.
        ready: what the native library needs to know of the tensor, kept after its first product.
        slices: the slices handed out, which keep packed copies of their own.
    """

    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    scale_absmax: Tensor | None = None
    scale_offset: Tensor | None = None
    packed: tuple[Tensor, ...] | None = field(default=None, init=False)
    packed_stamp: tuple[tuple[int, int], ...] = field(default=(), init=False)
    ready: ReadyWeight | None = field(default=None, init=False)
    slices: dict[int, QuantizedTensor] = field(default_factory=dict, init=False)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the storages, scales included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.state().values())

    def state(self, prefix: str = "weight") -> dict[str, Tensor]:
        """The tensors to store, by name: ``weight``, ``weight_scale`` and so on."""
        parts = {
            "": self.codes,
            "_scale": self.scale,
            "_zero": self.zero,
            "_scale_absmax": self.scale_absmax,
            "_scale_offset": self.scale_offset,
        }
        if "_shape" in self.format.layout(self.shape):
            parts["_shape"] = torch.tensor(self.shape, dtype=torch.int64)
        return {prefix + suffix: tensor for suffix, tensor in parts.items() if tensor is not None}

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Tensor],
        format: Format,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        prefix: str = "weight",
    ) -> QuantizedTensor:
        """Undo :meth:`state`.

        Raises:
            QkvError: a tensor is missing or has not the shape or dtype that the format asks for.
        """
        for suffix, (size, kind) in format.layout(shape).items():
            found = state.get(prefix + suffix)
            if found is None:
                raise QkvError(f"{prefix}{suffix} is missing: {format} needs it")
            if tuple(found.shape) != size or found.dtype != kind:
                raise QkvError(
                    f"{prefix}{suffix} is {found.dtype} {tuple(found.shape)}; {format} of shape {shape} "
                    f"needs {kind} {size}"
                )
        names = ("", "_scale", "_zero", "_scale_absmax", "_scale_offset")
        return cls(format, tuple(shape), dtype, *(state.get(prefix + name) for name in names))  # type: ignore[arg-type]

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed copies that products of this tensor have made."""
        own = sum(tensor.nbytes for tensor in self.packed or ())
        return own + sum(part.packed_nbytes for part in self.slices.values())

    def float_scale(self) -> Tensor:
        """The scales as float32 ``[..., out, groups]``, decoded from 8 bits where they are stored so."""
        if self.scale_absmax is None or self.scale_offset is None:
            return self.scale
        nested = NestedScale(self.scale, self.scale_absmax, self.scale_offset)
        return decode_scale(nested, self.format.scale_limit)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The float weight, ``[..., out, in]`` in ``dtype`` (that of the source by default).

        Codes times scales are computed in float32 and rounded once; values beyond the range of a
        narrow ``dtype`` are its largest.
        """
        from qkv.quantizers.kernels import dequantize

        return dequantize(self, dtype or self.dtype)

    def __getitem__(self, index: int) -> QuantizedTensor:
        """Slice ``index`` of the first dimension, sharing storage: one expert of a stack."""
        if len(self.shape) < 3 or self.scale_absmax is not None or self.format.group_size == "tensor":
            raise QkvError(f"a {len(self.shape)}-D {self.format} tensor cannot be indexed without dequantizing it")
        zero = None if self.zero is None else self.zero[index]
        fresh = QuantizedTensor(self.format, self.shape[1:], self.dtype, self.codes[index], self.scale[index], zero)
        known = self.slices.setdefault(index, fresh)
        if known.codes.data_ptr() != fresh.codes.data_ptr():
            known = self.slices[index] = fresh
        return known

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(prod(self.shape), 1)
        return f"QuantizedTensor({self.format}, shape={list(self.shape)}, {self.dtype}, {bits:.3g} bits a weight)"


def decode_rows(weight: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The reference dequantization in plain torch, a few million elements at a time."""
    columns = weight.shape[-1]
    num_rows = prod(weight.shape[:-1])
    out = torch.empty((num_rows, columns), dtype=dtype, device=weight.device)
    codes = weight.codes.reshape(num_rows, *weight.codes.shape[-2:])
    groups = codes.shape[1]
    scale = _per_row(weight.float_scale(), num_rows, groups)
    zero = None if weight.zero is None else _per_row(weight.zero, num_rows, groups)
    for rows in row_chunks(num_rows, columns):
        values = decode_groups(weight, codes[rows], scale[rows], None if zero is None else zero[rows])
        out[rows] = saturating_cast(from_groups(values, columns), dtype)
    return out.reshape(weight.shape)


def decode_groups(weight: QuantizedTensor, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """``float32 [..., groups, length]`` of some of ``weight``'s stored codes and their scales."""
    if weight.format.bits == 4:
        codes = unpack_nibbles(codes)[..., : weight.format.group_length(weight.shape[-1])]
    if weight.format.name == "nf4":
        return nf4.decode(codes, scale)
    return integer.decode(codes, scale, zero, weight.format.bits)


def _per_row(scale: Tensor, num_rows: int, groups: int) -> Tensor:
    """Scales as ``[rows, groups]``: a single one ("tensor") is spread without copying."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(num_rows, groups)
    return scale.reshape(num_rows, groups)


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to ``dtype``; what exceeds its range becomes its largest value, not infinity."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(torch.bfloat16).max:
        values = values.clamp(-limit, limit)
    return values.to(dtype)
