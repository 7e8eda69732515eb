"""A number format is a value: ``FORMATS["nf4"]``, ``Format.parse("int8:g64:asym")``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Final

import torch

from qkv.errors import QkvError

BITS: Final = {"int8": 8, "int4": 4, "nf4": 4}
NESTED_BLOCK: Final = 256
"""Scales that share one second-level scale under double quantization (QLoRA, arXiv 2305.14314)."""
SUFFIXES: Final = ("_scale", "_zero", "_scale_absmax", "_scale_offset", "_shape")
"""What is appended to a weight's name for the tensors that go with its codes."""
MAX_GROUP_SIZE: Final = 2**20
DEFAULT_GROUP_SIZE: Final = 64


@dataclass(frozen=True)
class Format:
    """How a weight is stored.

    Args:
        name: ``"int8"``, ``"int4"`` or ``"nf4"``.
        group_size: elements along the input dimension that share a scale, or ``"row"`` (one scale a
            row) or ``"tensor"`` (one scale in all). The last group of a row may be shorter.
        symmetric: absmax scaling; otherwise a zero point a group (integer formats only).
        double_quant: the float32 scales are themselves stored in 8 bits, in blocks of 256.

    Raises:
        QkvError: a name, group size or combination that does not exist.
    """

    name: str
    group_size: int | str = DEFAULT_GROUP_SIZE
    symmetric: bool = True
    double_quant: bool = False

    def __post_init__(self) -> None:
        if self.name not in BITS:
            raise QkvError(f"unknown format {self.name!r}; choose from {', '.join(BITS)}")
        if self.name == "nf4" and not self.symmetric:
            raise QkvError("nf4 has no asymmetric variant; use int4:asym, or nf4 as it is")
        self._check_group_size()

    def _check_group_size(self) -> None:
        size = self.group_size
        if isinstance(size, str) and size in ("row", "tensor"):
            return
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_GROUP_SIZE:
            raise QkvError(f"group size {size!r} is not a whole number from 1 to {MAX_GROUP_SIZE:,}, 'row' or 'tensor'")

    @property
    def bits(self) -> int:
        """Bits a stored code takes, scales not counted."""
        return BITS[self.name]

    @property
    def scale_limit(self) -> float:
        """The largest scale under which every code stands for a finite float32."""
        largest: float = torch.finfo(torch.float32).max
        if self.name == "nf4" or not self.symmetric:
            return largest
        return float(largest / (2 ** (self.bits - 1) - 1) * (1 - 2.0**-22))

    @classmethod
    def parse(cls, text: str | Format) -> Format:
        """Read ``name[:gN|:row|:tensor][:sym|:asym][:double]``, for example ``int8:g64:asym``."""
        if isinstance(text, Format):
            return text
        if not isinstance(text, str) or not text:
            raise QkvError(f"a format is a name such as {', '.join(FORMATS)}; got {text!r}")
        name, *options = text.split(":")
        format = cls(name)
        for option in options:
            format = replace(format, **_option(option, text))
        return format

    def __str__(self) -> str:
        group = self.group_size if isinstance(self.group_size, str) else f"g{self.group_size}"
        parts = [self.name, group] + ["asym"] * (not self.symmetric) + ["double"] * self.double_quant
        return ":".join(parts)

    def group_length(self, columns: int) -> int:
        """Elements of one stored group of a row of ``columns`` elements (at least 1)."""
        if isinstance(self.group_size, str):
            return max(columns, 1)
        return max(min(self.group_size, columns), 1)

    def layout(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the stored tensors of a weight of ``shape`` ``[..., out, in]``.

        Returns:
            ``{suffix: (shape, dtype)}``: ``""`` the codes ``[..., out, groups, bytes of a group]``,
            ``"_scale"``, ``"_zero"`` (asymmetric), ``"_scale_absmax"`` and ``"_scale_offset"`` (double
            quantization), ``"_shape"`` (the float shape, where the codes do not tell it).
        """
        *rows, columns = shape
        length = self.group_length(columns)
        groups = ceil(columns / length)
        stored = length if self.bits == 8 else ceil(length / 2)
        scales = (*rows, groups) if self.group_size != "tensor" else (*(1 for _ in rows), min(groups, 1))
        signed = self.bits == 8 and self.symmetric
        result: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "": ((*rows, groups, stored), torch.int8 if signed else torch.uint8),
            "_scale": (scales, torch.uint8 if self.double_quant else torch.float32),
        }
        if not self.symmetric:
            result["_zero"] = (scales, torch.uint8)
        if self.double_quant:
            result["_scale_absmax"] = ((ceil(prod(scales) / NESTED_BLOCK),), torch.float32)
            result["_scale_offset"] = ((), torch.float32)
        if groups * stored * 8 // self.bits != columns:
            result["_shape"] = ((len(shape),), torch.int64)
        return result

    def stored_nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes a weight of ``shape`` takes in this format, everything counted."""
        return sum(prod(size) * dtype.itemsize for size, dtype in self.layout(shape).values())


def _option(option: str, text: str) -> dict[str, Any]:
    if option in ("row", "tensor"):
        return {"group_size": option}
    if option.startswith("g") and option[1:].isdecimal():
        return {"group_size": int(option[1:])}
    if option in ("sym", "asym"):
        return {"symmetric": option == "sym"}
    if option == "double":
        return {"double_quant": True}
    raise QkvError(f"unknown option {option!r} in format {text!r}; options: gN, row, tensor, sym, asym, double")


FORMATS: Final[dict[str, Format]] = {
    "int8": Format("int8"),
    "int8:asym": Format("int8", symmetric=False),
    "int8:row": Format("int8", "row"),
    "int8:double": Format("int8", double_quant=True),
    "int4": Format("int4"),
    "int4:asym": Format("int4", symmetric=False),
    "nf4": Format("nf4"),
    "nf4:double": Format("nf4", double_quant=True),
}
"""The usual formats by the name that the command line and the tests use."""
