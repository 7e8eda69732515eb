"""The header of a GGUF file: its tensors and their types, without reading data and without other libraries.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: ``GGUF``, a version, the numbers
of tensors and of metadata entries; the entries; names, shapes, types and places of the tensors; their data.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeGuard

import torch

from qkv.errors import CheckpointError, shown
from qkv.memory.items import Item


class Kind(NamedTuple):
    """A type of numbers: how many make a block, and its bytes, scales included; ``dtype`` of a plain one."""

    name: str
    block: int
    nbytes: int
    dtype: torch.dtype | None = None


KINDS: Final = {
    0: Kind("F32", 1, 4, torch.float32), 1: Kind("F16", 1, 2, torch.float16), 30: Kind("BF16", 1, 2, torch.bfloat16),
    28: Kind("F64", 1, 8, torch.float64), 24: Kind("I8", 1, 1, torch.int8), 25: Kind("I16", 1, 2, torch.int16),
    26: Kind("I32", 1, 4, torch.int32), 27: Kind("I64", 1, 8, torch.int64),
    2: Kind("Q4_0", 32, 18), 3: Kind("Q4_1", 32, 20), 6: Kind("Q5_0", 32, 22), 7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34), 9: Kind("Q8_1", 32, 40), 10: Kind("Q2_K", 256, 84), 11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144), 13: Kind("Q5_K", 256, 176), 14: Kind("Q6_K", 256, 210), 15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66), 17: Kind("IQ2_XS", 256, 74), 18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50), 20: Kind("IQ4_NL", 32, 18), 21: Kind("IQ3_S", 256, 110), 22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136), 29: Kind("IQ1_M", 256, 56), 34: Kind("TQ1_0", 256, 54), 35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
}  # fmt: skip
"""By their number in the file (``ggml_type`` of ggml.h)."""
SCALARS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value by the number of its type."""
STRING, ARRAY, MAX_DIMENSIONS, MAX_COUNT, MAX_TEXT = 8, 9, 4, 10**7, 2**16
"""A real header has fewer tensors, entries and strings than that, and shorter names."""


def is_gguf(path: object) -> TypeGuard[str | Path]:
    """Whether a path is named as a GGUF file."""
    return isinstance(path, str | Path) and Path(path).suffix.lower() == ".gguf"


def gguf_items(path: Path) -> list[Item]:
    """The weights of a GGUF file; the format of a quantized one is its type there, scales counted within.

    Raises:
        CheckpointError: no GGUF file, damaged or cut short, a type not known here, or a part of a model.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file).items()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    """Walks through a header once; what is long is passed over, so that nothing is allocated on its word."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file, self._position = path, file, 0
        self._nbytes = os.fstat(file.fileno()).st_size

    def items(self) -> list[Item]:
        """The tensors, in the order of the file."""
        if self._nbytes < 4 or self._bytes(4) != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not begin with GGUF")
        version = self._number(4)
        if version not in (2, 3):
            raise CheckpointError(f"{self._path} is GGUF of version {version} or big-endian; 2 and 3 are read here")
        num_tensors, num_entries = self._count(), self._count()
        metadata = dict(self._entry() for _ in range(num_entries))
        if metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{self._path} is one of {metadata['split.count']} files of a model; join them first "
                "(llama-gguf-split --merge)"
            )
        found = [self._tensor() for _ in range(num_tensors)]
        self._check_ends(found, metadata.get("general.alignment", 32))
        return [item for item, _ in found]

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._bytes(nbytes), "little")

    def _count(self) -> int:
        found = self._number(8)
        if found > MAX_COUNT:
            raise self._damaged()
        return found

    def _bytes(self, nbytes: int) -> bytes:
        if nbytes > min(self._nbytes - self._position, MAX_TEXT):
            raise self._damaged()
        self._position += nbytes
        return self._file.read(nbytes)

    def _pass(self, nbytes: int) -> None:
        if nbytes <= MAX_TEXT:
            self._bytes(nbytes)
            return
        if nbytes > self._nbytes - self._position:
            raise self._damaged()
        self._position = self._file.seek(self._position + nbytes)

    def _text(self) -> str:
        return self._bytes(self._number(8)).decode("utf-8", "replace")

    def _damaged(self) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated or damaged in its header; get it again")

    def _entry(self) -> tuple[str, int]:
        """A metadata entry, with its value where it is a whole number."""
        name, kind = self._text(), self._number(4)
        if kind in (4, 2):  # unsigned, 4 or 2 bytes: alignment and number of parts
            return name, self._number(SCALARS[kind])
        self._skip(kind)
        return name, 0

    def _skip(self, kind: int) -> None:
        if kind == STRING:
            self._pass(self._number(8))
        elif kind == ARRAY:
            kind, count = self._number(4), self._count()
            if kind == STRING:
                for _ in range(count):
                    self._pass(self._number(8))
            else:
                self._pass(self._size(kind) * count)
        else:
            self._pass(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in SCALARS:
            raise self._damaged()
        return SCALARS[kind]

    def _tensor(self) -> tuple[Item, int]:
        """A tensor, and where its data ends."""
        name, num_dimensions = self._text(), self._number(4)
        if num_dimensions > MAX_DIMENSIONS:
            raise CheckpointError(f"{self._path}: tensor {shown(name)} has {num_dimensions} dimensions; get it again")
        shape = tuple(self._number(8) for _ in range(num_dimensions))[::-1]  # the file has columns first
        number, offset = self._number(4), self._number(8)
        if number not in KINDS:
            raise CheckpointError(f"{self._path}: tensor {shown(name)} is of type {number}, which is not known here")
        kind = KINDS[number]
        if shape and shape[-1] % kind.block:
            raise CheckpointError(f"{self._path}: tensor {shown(name)} has rows of {shape[-1]}, and {kind.name} has "
                                  f"blocks of {kind.block}; get it again")  # fmt: skip
        nbytes = prod(shape) // kind.block * kind.nbytes
        item = Item(name, None if kind.dtype else kind.name, kind.dtype or torch.uint8, shape, nbytes)
        return item, offset + nbytes

    def _check_ends(self, found: list[tuple[Item, int]], alignment: int) -> None:
        start = -(-self._position // max(alignment, 1)) * max(alignment, 1)
        for item, end in found:
            if start + end > self._nbytes:
                raise CheckpointError(
                    f"{self._path} is truncated: {shown(item.name)} ends at byte {start + end} of {self._nbytes}; "
                    "get it again"
                )
