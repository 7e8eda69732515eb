"""The header of a safetensors file: what tensors it holds and where, without reading their data.

The format (https://huggingface.co/docs/safetensors): 8 bytes of little-endian length, JSON of that length,
and the tensors' bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.strict_json import MAX_JSON_NBYTES, parse_object
from qkv.errors import CheckpointError, shown

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

_MAX_INT64 = 2**63 - 1
_GIT_LFS = b"version "


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `nbytes` bytes of `path` from byte `offset`, counted from the file's start."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    path: Path
    offset: int


def read_header(path: str | Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a safetensors file, in file order, and its metadata.

    Everything is checked against the file's real size, so that a truncated, padded or forged file is refused
    here and nothing is ever allocated on a header's word.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    path = path if isinstance(path, Path) else Path(path)
    header, data_start, file_nbytes = _read_json(path)
    metadata = _checked_metadata(path, header.pop("__metadata__", {}))
    entries = [_entry(path, data_start, name, fields) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_cover(path, entries, data_start, file_nbytes)
    return {entry.name: entry for entry in entries}, metadata


def header_bytes(path: Path) -> bytes:
    """The header of a file that `read_header` has taken, as it lies there: what its tensors are, without their data."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def checked_nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a dense tensor; OverflowError where torch could not even hold the shape.

    >>> checked_nbytes((2, 3), torch.bfloat16)
    12
    """
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= max(size, 1)
        if nbytes > _MAX_INT64:
            raise OverflowError(f"shape {shown(list(shape))} of {dtype} needs more than 2**63 bytes")
    return 0 if 0 in shape else nbytes


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the parsed header, the byte at which data begins, and the file's size."""
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"{path} is missing or not a file")
        with path.open("rb") as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            data_start = 8 + _header_nbytes(path, file.read(8), file_nbytes)
            raw = file.read(data_start - 8)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path} is not a safetensors file: its header does not begin with '{{'")
    return parse_object(raw, f"{path}: header", unique_keys=True), data_start, file_nbytes


def _header_nbytes(path: Path, prefix: bytes, file_nbytes: int) -> int:
    if prefix == _GIT_LFS:
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    nbytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or nbytes > file_nbytes - 8:
        claim = f", its header claims {nbytes}" if len(prefix) == 8 else ""
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file: it has {file_nbytes} bytes{claim}; get it again"
        )
    if nbytes > MAX_JSON_NBYTES:
        raise CheckpointError(f"{path}: a header of {nbytes} bytes is over the limit of {MAX_JSON_NBYTES}")
    return nbytes


def _checked_metadata(path: Path, metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings, not {shown(metadata)}")
    return metadata


def _entry(path: Path, data_start: int, name: str, fields: object) -> TensorEntry:
    try:
        name.encode("utf-8")
        dtype, shape, begin, nbytes = _checked_fields(fields)
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: the tensor name {shown(name)} is not valid Unicode") from None
    except (CheckpointError, OverflowError) as error:
        raise CheckpointError(f"{path}: tensor {shown(name)}: {error}") from None
    return TensorEntry(name, dtype, shape, nbytes, path, data_start + begin)


def _checked_fields(fields: object) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return the dtype, the shape, the byte of the data at which the tensor begins, and its bytes."""
    if not isinstance(fields, dict):
        raise CheckpointError(f"must be described by an object, not {shown(fields)}")
    dtype = _checked_dtype(fields.get("dtype"))
    shape = _checked_sizes("shape", fields.get("shape"))
    offsets = _checked_sizes("data_offsets", fields.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"data_offsets must be [begin, end] with begin <= end, not {shown(list(offsets))}")
    nbytes = checked_nbytes(shape, dtype)
    if offsets[1] - offsets[0] != nbytes:
        held = offsets[1] - offsets[0]
        raise CheckpointError(f"{dtype} {shown(list(shape))} takes {nbytes} bytes, its offsets hold {held}")
    return dtype, shape, offsets[0], nbytes


def _checked_dtype(dtype: object) -> torch.dtype:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"unknown dtype {shown(dtype)}; known are {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _checked_sizes(field: str, value: object) -> tuple[int, ...]:
    # type() and not isinstance(): JSON's true is an int to Python.
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n <= _MAX_INT64 for n in value):
        raise CheckpointError(f"{field} must be a list of integers from 0 to 2**63-1, not {shown(value)}")
    return tuple(value)


def _check_cover(path: Path, entries: list[TensorEntry], data_start: int, file_nbytes: int) -> None:
    """Check that the tensors follow each other without hole or overlap up to the file's last byte."""
    position = data_start
    for entry in entries:
        if entry.offset != position:
            fault = "overlaps the tensor before it" if entry.offset < position else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {shown(entry.name)} {fault}: it begins at {entry.offset}, not {position}"
            )
        position += entry.nbytes
    if file_nbytes != position:
        fault = "is truncated" if file_nbytes < position else "has extra bytes at its end"
        raise CheckpointError(f"{path} {fault}: it has {file_nbytes} bytes, its header says {position}; get it again")
