"""A weight as the native library reads it: filled in once, so that a product costs one call of few arguments."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv.quantizers.kernels import native

if TYPE_CHECKING:
    from qkv.quantizers.tensor import QuantizedTensor

_BIAS, _FAST, _THREADS = 1 << 2, 1 << 4, 1 << 5
"""Where the bias' dtype, the mode and the number of threads begin in the last argument; x's dtype is first."""


class _Struct(ctypes.Structure):
    """``struct qkv_weight``."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("interleaved", ctypes.c_int),
        *((name, ctypes.c_ssize_t) for name in ("out", "in_", "group", "groups", "group_bytes")),
    )


class ReadyWeight:
    """Products with a weight straight from its stored codes, accumulated in float32.

    Two modes. The exact one multiplies in float32 (within 1e-5 of the float64 product) and always runs
    for float32 and float16 x. The fast one runs for bfloat16 x, unless ``exact``: within 3e-3 for nf4, whose
    levels are rounded to bfloat16, and within 1e-4 for integer codes, where x may be scaled to 16 bits.

    Args:
        codes: ``[out, groups, bytes of a group]``, int8 or uint8; contiguous and on the CPU, as all tensors here.
        scale: float32 ``[out, groups]``.
        zero: uint8 ``[out, groups]``, or None for symmetric formats.
        kind: ``"int8"``, ``"int4"`` or ``"nf4"``.
        in_features: columns of the weight.
        group_size: elements of a stored group.

    The memory of the three tensors is read at every call, and kept for as long as this is; ask :meth:`reads` whether
    a weight still lies there.
    """

    __slots__ = ("_address", "_struct", "in_features", "out_features", "pointers", "tensors")

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        *,
        kind: str,
        in_features: int,
        group_size: int,
        interleaved: bool = False,
    ) -> None:
        self.in_features, self.out_features = in_features, codes.shape[0]
        self.tensors = (codes, scale, zero)
        self.pointers = _pointers(codes, scale, zero)
        sizes = (codes.shape[0], in_features, group_size, codes.shape[1], codes.shape[2])
        self._struct = _Struct(*self.pointers, native.KINDS[kind], interleaved, *sizes)
        self._address = ctypes.addressof(self._struct)

    def reads(self, weight: QuantizedTensor) -> bool:
        """Whether ``weight`` lies where the memory is read."""
        return self.pointers == _pointers(weight.codes, weight.scale, weight.zero)

    def takes(self, x: Tensor) -> bool:
        """Whether :meth:`linear` serves ``x``, and serves it best."""
        if not x.is_cpu or x.shape[-1] != self.in_features or x.dtype not in native.DTYPES:
            return False
        return x.numel() <= native.most_rows(x.dtype) * self.in_features

    def linear(self, x: Tensor, bias: Tensor | None, *, exact: bool = native.EXACT) -> Tensor:
        """``x @ weight.T + bias``.

        Args:
            x: ``[..., in]``, float32, bfloat16 or float16.
            bias: ``[out]``, float32, bfloat16 or float16, or None.
            exact: float32 products for bfloat16 x too; the environment variable ``QKV_EXACT=1`` makes it so.

        Returns:
            ``[..., out]`` in x's dtype.

        Raises:
            MemoryError: no memory for a copy of x.
        """
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        mode = native.DTYPES[x.dtype] + (0 if exact else _FAST) + _THREADS * torch.get_num_threads()
        pointer = None
        if bias is not None:
            pointer, mode = bias.data_ptr(), mode + _BIAS * native.DTYPES[bias.dtype]
        rows = y.numel() // self.out_features if self.out_features else 0
        if native.library().qkv_linear(self._address, x.data_ptr(), pointer, y.data_ptr(), rows, mode):
            raise MemoryError(f"no memory to prepare {rows} rows of {self.in_features} elements")
        return y

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the weight lies elsewhere and is made ready anew."""
        return type(None), ()


def _pointers(codes: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[int, int, int | None]:
    return codes.data_ptr(), scale.data_ptr(), None if zero is None else zero.data_ptr()
