"""How a block of keys or values is stored: a codec is a value, such as ``Codec.parse("int4:channel:g32")``.

The integer codecs share one affine rule, ``x = (code - zero) * scale``. The scale is bfloat16, which has
float32's range and so neither overflows nor underflows, rounded up so that the group's range stays
covered; the zero point is a whole number in int16, and the scale is never so small that it would not fit.
Keys are cut per channel and values per token by default: a few key channels are a hundred times larger
than the others, and a scale shared with them would drown the rest (KIVI, arXiv 2402.02750).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Final

import torch
from torch import Tensor

from qkv.cache.hadamard import spread
from qkv.errors import QkvError
from qkv.quantizers import integer, nf4
from qkv.quantizers.packing import pack_crumbs, pack_nibbles, unpack_crumbs, unpack_nibbles

BITS: Final = {"exact": 0, "int8": 8, "int4": 4, "int2": 2, "nf4": 4}
GROUP_SIZES: Final = {"exact": 1, "int8": 128, "int4": 64, "int2": 32, "nf4": 64}
AXES: Final = ("channel", "token")
_MAX_ZERO: Final = 32000
_CLIPS: Final = (1.0, 0.9, 0.8, 0.7, 0.6)
_ROUND_UP: Final = 1 + 2.0**-7
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Codec:
    """How one side (keys or values) of a block is stored.

    Args:
        name: ``"exact"`` (the model's dtype), ``"int8"``, ``"int4"``, ``"int2"`` or ``"nf4"``.
        axis: ``"channel"`` (a scale a channel, over ``group_size`` tokens) or ``"token"`` (a scale a
            token, over ``group_size`` channels).
        group_size: elements that share a scale: ``GROUP_SIZES`` unless said otherwise. A
            group never crosses a block or a head; where it does not divide them, groups are shorter.
        rotate: encode after a Hadamard rotation of the channels, which queries and outputs follow. None: for
            ``int2``, and for 4 bits per token, where one outlier would waste the few levels of its group.

    Raises:
        QkvError: a name, axis or group size that does not exist.
    """

    name: str
    axis: str = "token"
    group_size: int | None = None
    rotate: bool | None = None

    def __post_init__(self) -> None:
        if self.name not in BITS:
            raise QkvError(f"unknown cache codec {self.name!r}; choose from {', '.join(BITS)}")
        if self.axis not in AXES:
            raise QkvError(f"a cache codec goes per channel or per token, not per {self.axis!r}")
        size = self.group_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 4096):
            raise QkvError(f"group size {size!r} of a cache codec is not a whole number from 1 to 4096")

    @classmethod
    def parse(cls, text: str | Codec, axis: str = "token") -> Codec:
        """Read ``name[:channel|:token][:gN][:rotate|:plain]``; ``axis`` holds when the text names none.

        ``nf4`` is per token then: its levels are made for normal values about 0, which rotated tokens are.
        """
        if isinstance(text, Codec):
            return text
        if not isinstance(text, str):
            raise QkvError(f"a cache codec is a name such as {', '.join(CODECS)}; got {text!r}")
        name, *options = text.split(":")
        codec = cls(name, "token" if name == "nf4" else axis)
        for option in options:
            codec = replace(codec, **_option(option, text))
        return codec

    def __str__(self) -> str:
        if self.is_exact:
            return self.name
        rotate = "" if self.rotate is None else ":rotate" if self.rotate else ":plain"
        return f"{self.name}:{self.axis}" + (f":g{self.group_size}" if self.group_size else "") + rotate

    @property
    def is_rotated(self) -> bool:
        """Whether codes are of rotated channels."""
        return not self.is_exact and (self._rotates if self.rotate is None else self.rotate)

    @property
    def _rotates(self) -> bool:
        return self.name == "int2" or (self.axis == "token" and self.bits == 4)

    @property
    def is_exact(self) -> bool:
        """Whether what comes out is bit for bit what went in."""
        return self.name == "exact"

    @property
    def bits(self) -> int:
        """Bits a stored code takes (0: the model's dtype)."""
        return BITS[self.name]

    def group_length(self, extent: int) -> int:
        """Elements of one group along an axis of ``extent`` elements; always divides it."""
        wanted = self.group_size or GROUP_SIZES[self.name]
        groups = ceil(extent / max(min(wanted, extent), 1))
        return extent // groups if extent % groups == 0 else extent

    def layout(self, heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> Layout:
        """Shapes and dtypes of the tensors of one block, ``{name: (shape, dtype)}``."""
        if self.is_exact:
            return {"codes": ((heads, tokens, head_dim), dtype)}
        codes = (heads, tokens, ceil(head_dim * self.bits / 8))
        if self.axis == "channel":
            scales = (heads, tokens // self.group_length(tokens), head_dim)
        else:
            scales = (heads, tokens, head_dim // self.group_length(head_dim))
        layout: Layout = {"codes": (codes, torch.uint8), "scale": (scales, torch.bfloat16)}
        if self.name != "nf4":
            layout["zero"] = (scales, torch.int16)
        return layout

    def stored_nbytes(self, heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block, scales and zero points counted."""
        return sum(prod(shape) * d.itemsize for shape, d in self.layout(heads, tokens, head_dim, dtype).values())

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Store blocks ``[blocks, heads, tokens, head_dim]`` of any float dtype; a group that holds a NaN or
        infinity comes back NaN, as an exact cache would spread it."""
        if self.is_exact:
            return {"codes": x.contiguous()}
        x = x.float()
        groups = self._to_groups(spread(x) if self.is_rotated else x)
        low, high = groups.amin(-1), groups.amax(-1)
        stored: dict[str, Tensor] = {}
        if self.name == "nf4":
            absmax = torch.maximum(high, -low)
            nearest = absmax.clamp(max=3e38).to(torch.bfloat16)
            stored["scale"] = torch.where(absmax.isfinite(), nearest, torch.nan)
            codes = nf4.encode(groups.nan_to_num().contiguous(), stored["scale"].float().nan_to_num())
        else:
            if self.name == "int2":
                low, high = _clip(groups, low, high)
            stored["scale"], stored["zero"] = _affine(low, high, self.bits)
            scale = stored["scale"].float().nan_to_num()
            codes = integer.encode(groups.nan_to_num(), scale, stored["zero"].float(), self.bits)
        return {"codes": self._pack(self._from_groups(codes)), **stored}

    def decode(self, stored: dict[str, Tensor], head_dim: int, dtype: torch.dtype) -> Tensor:
        """Undo :meth:`encode`: ``dtype [blocks, heads, tokens, head_dim]``."""
        if self.is_exact:
            return stored["codes"]
        codes = self._to_groups(self._unpack(stored["codes"])[..., :head_dim])
        scale = stored["scale"].float()
        if self.name == "nf4":
            groups = nf4.decode(codes, scale)
        else:
            groups = integer.decode(codes, scale, stored["zero"], self.bits)
        x = self._from_groups(groups)
        return (spread(x) if self.is_rotated else x).to(dtype)

    def _to_groups(self, x: Tensor) -> Tensor:
        """``[..., tokens, dim]`` to ``[..., groups of tokens, dim, g]`` or ``[..., tokens, groups, g]``."""
        if self.axis == "token":
            return torch.unflatten(x, -1, (-1, self.group_length(x.shape[-1])))
        return torch.unflatten(x, -2, (-1, self.group_length(x.shape[-2]))).transpose(-1, -2)

    def _from_groups(self, groups: Tensor) -> Tensor:
        if self.axis == "token":
            return groups.flatten(-2)
        return groups.transpose(-1, -2).flatten(-3, -2)

    def _pack(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.contiguous()
        return pack_nibbles(codes) if self.bits == 4 else pack_crumbs(codes)

    def _unpack(self, packed: Tensor) -> Tensor:
        return packed if self.bits == 8 else unpack_nibbles(packed) if self.bits == 4 else unpack_crumbs(packed)


def _cover(least: Tensor) -> Tensor:
    """A bfloat16 no smaller than ``least`` (float32, >= 0); NaN where ``least`` is not finite."""
    least = torch.where(least > 0, least.clamp(min=torch.finfo(torch.float32).tiny), least)
    scale = (least * _ROUND_UP).clamp(max=3e38).to(torch.bfloat16)
    nearest = least.clamp(max=3e38).to(torch.bfloat16)
    scale = torch.where(nearest.float() >= least, nearest, scale)
    return torch.where(least.isfinite(), scale, torch.nan)


def _affine(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point whose ``2**bits`` steps cover ``low … high`` wherever that range lies."""
    steps = 2**bits - 1
    least = high / steps - low / steps
    reach = torch.maximum(high.abs(), low.abs()) / _MAX_ZERO
    scale = _cover(torch.maximum(least, reach))
    divisor = torch.where(scale > 0, scale, 1.0).float()
    zero = torch.round(-low / divisor).nan_to_num(0.0, 0.0, 0.0).clamp(-_MAX_ZERO - 1, _MAX_ZERO + 1)
    return scale, zero.to(torch.int16)


def _clip(groups: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Narrow each group's range to where four steps lie best (least squares); its ends are then cut off."""
    best_low, best_high = low, high
    least = torch.full_like(low, torch.inf)
    for keep in _CLIPS:
        middle, reach = (low + high) / 2, (high - low) / 2 * keep
        bottom, step = middle - reach, (2 * reach / 3).clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.round((groups - bottom[..., None]) / step[..., None]).clamp_(0, 3)
        error = (codes * step[..., None] + bottom[..., None] - groups).square().sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best_low = torch.where(better, bottom, best_low)
        best_high = torch.where(better, middle + reach, best_high)
    return best_low, best_high


def _option(option: str, text: str) -> dict[str, Any]:
    if option in AXES:
        return {"axis": option}
    if option in ("rotate", "plain"):
        return {"rotate": option == "rotate"}
    if option.startswith("g") and option[1:].isdecimal():
        return {"group_size": int(option[1:])}
    raise QkvError(f"unknown option {option!r} in cache codec {text!r}; options: channel, token, gN, rotate, plain")


CODECS: Final[dict[str, Codec]] = {name: Codec(name) for name in BITS}
"""The codecs by name, per token; keys take them per channel unless told otherwise."""
