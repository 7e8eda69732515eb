"""Modules whose weight may lie interleaved in memory, the order in which decoding reads it fastest.

That is asked for (:func:`qkv.prepare_`) and shows nowhere: whatever reads the weight in another way, saving included,
finds the stored order again, and the next product that is served interleaves it anew. Either way the bytes stay as
many as they were; one tensor at a time is held twice while it is turned.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, Final

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.quantizers.holder import CACHES, Holder
from qkv.quantizers.interleave import in_order, interleaved, refuses
from qkv.quantizers.kernels import native
from qkv.quantizers.kernels.ready import ReadyWeight
from qkv.quantizers.tensor import QuantizedTensor

_TURNED: Final = ("weight", "weight_scale", "weight_zero")
"""The buffers that are interleaved; scales in 8 bits stay, and are decoded once instead."""
_TURNING: Final = RLock()
"""Held while buffers are turned or taken in the stored order, for products may run in several threads."""


class Prepared(Holder):
    """A :class:`Holder` of one ``weight`` that can lie interleaved."""

    prepared: bool = False
    """Whether the weight is to be interleaved as soon as a product is served that way."""
    interleaved: bool = False
    """Whether it is at present."""

    def cannot_prepare(self) -> str | None:
        """Why this weight is not served interleaved here, in words for people; None when it is."""
        if (reason := native.cannot_serve_bf16()) is not None:
            return reason
        spec = self.specs["weight"]
        if spec.dtype != torch.bfloat16:
            return f"serves bfloat16 models, not {str(spec.dtype).removeprefix('torch.')}"
        return refuses(spec.format, spec.shape)

    def strips(self, x: Tensor) -> ReadyWeight | None:
        """The interleaved weight where it serves ``x``; None where another kernel is to."""
        if torch.compiler.is_compiling():
            if self.interleaved:
                raise QkvError(
                    "an interleaved weight cannot be compiled; call qkv.unprepare_(model) before torch.compile"
                )
            return None
        if not self._serves(x):
            return None
        known: ReadyWeight | None = self.__dict__.get("_strips")
        if known is None or known.tensors[0] is not self._buffers["weight"]:
            known = self._interleave()
        return known

    def _serves(self, x: Tensor) -> bool:
        bias = self._parameters.get("bias")
        if x.dtype != torch.bfloat16 or not x.is_cpu or x.shape[-1] != self.specs["weight"].shape[1]:
            return False
        if bias is not None and bias.dtype not in native.DTYPES:
            return False
        return not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))

    def _interleave(self) -> ReadyWeight | None:
        with _TURNING:
            if not self.interleaved:
                if not self._stored().codes.is_cpu or self.cannot_prepare() is not None:
                    return None
                self._turn(interleaved)
            known = self.__dict__["_strips"] = self._ready()
        return known

    def put_in_order(self) -> None:
        """The stored order again; nothing where it lies so."""
        with _TURNING:
            if self.interleaved:
                self._turn(in_order)

    def _turn(self, turn: Callable[[Tensor], Tensor]) -> None:
        """New tensors in the place of the old, which a product in another thread may still read."""
        for name in _TURNED:
            buffer = self._buffers.get(name)
            if buffer is not None and (name != "weight_scale" or buffer.dtype == torch.float32):
                self._buffers[name] = turn(buffer)
        for cache in CACHES:
            self.__dict__.pop(cache, None)
        self.interleaved = turn is interleaved

    def _stored(self) -> QuantizedTensor:
        """The buffers as they lie."""
        spec = self.specs["weight"]
        return QuantizedTensor.from_state(self._buffers, spec.format, spec.shape, spec.dtype)  # type: ignore[arg-type]

    def _ready(self) -> ReadyWeight:
        stored, columns = self._stored(), self.specs["weight"].shape[1]
        return ReadyWeight(
            stored.codes,
            stored.scale if stored.scale_absmax is None else interleaved(stored.float_scale()),
            stored.zero,
            kind=stored.format.name,
            in_features=columns,
            group_size=stored.format.group_length(columns),
            interleaved=True,
        )

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the copies that kernels keep: packed ones, and scales decoded from 8 bits."""
        known: ReadyWeight | None = self.__dict__.get("_strips")
        decoded = known is not None and known.tensors[1] is not self._buffers["weight_scale"]
        return super().packed_nbytes + (known.tensors[1].nbytes if known is not None and decoded else 0)

    def quantized(self, name: str = "weight") -> QuantizedTensor:
        """The tensor held under ``name``, in the stored order."""
        if torch.compiler.is_compiling():  # a lock cannot be traced, and `strips` has refused what is interleaved
            return super().quantized(name)
        with _TURNING:
            self.put_in_order()
            return super().quantized(name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with _TURNING:
            self.put_in_order()
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.put_in_order()
        super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.put_in_order()
        return super()._apply(fn, recurse)
