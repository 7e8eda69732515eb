"""A safetensors file written one tensor, or one piece of a tensor, at a time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from qkv.checkpoint.header import DTYPES, checked_nbytes
from qkv.checkpoint.raw import byte_view
from qkv.errors import shown

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written: all that a header needs to know of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"{shown(self.name)}: safetensors files cannot hold {self.dtype}")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return checked_nbytes(self.shape, self.dtype)


class StreamWriter:
    """Writes the header first, then each tensor as it comes, so that only that tensor is in memory.

    The tensors come in the order of `specs`. In the file the widest dtypes lie first, as safetensors itself
    does it, so that every tensor is aligned for who maps it; within a width the order is that of `specs`.

    >>> with StreamWriter(path, [TensorSpec("a", torch.int8, (2, 3))]) as writer:  # doctest: +SKIP
    ...     writer.write("a", torch.zeros(2, 3, dtype=torch.int8))
    """

    def __init__(
        self, path: str | Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Create the file, which may not exist yet, and write its header; no metadata means `format: pt`."""
        header, self._offsets = _layout(specs, {"format": "pt"} if metadata is None else metadata)
        self._path = Path(path)
        self._specs = tuple(specs)
        self._num_done = 0  # tensors complete
        self._position = 0  # bytes written of the tensor that is not
        self._file = self._path.open("xb")
        try:
            self._file.write(header)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor whole; ValueError unless name, dtype and shape are the next spec's."""
        spec = self._next_spec(name)
        if self._position or tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{shown(name)} needs shape {list(spec.shape)} in one piece, got {list(tensor.shape)}")
        self._append(spec, tensor)

    def write_chunk(self, name: str, rows: torch.Tensor) -> None:
        """Write the next rows (along dimension 0) of the next tensor; the last rows complete it."""
        spec = self._next_spec(name)
        if not spec.shape or tuple(rows.shape[1:]) != spec.shape[1:] or rows.dim() != len(spec.shape):
            raise ValueError(f"rows of {list(rows.shape)} do not fit {shown(name)} of shape {list(spec.shape)}")
        self._append(spec, rows)

    def close(self) -> None:
        """Check that every tensor is complete and sync the file; ValueError where one is missing."""
        if self._file.closed:
            return
        if self._num_done < len(self._specs):
            missing = self._specs[self._num_done].name
            self.abort()
            raise ValueError(f"{self._path.name}: tensor {shown(missing)} was not written in full")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Close and remove the file."""
        with contextlib.suppress(OSError):  # a full disk refuses the last flush as well
            self._file.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _next_spec(self, name: str) -> TensorSpec:
        expected = self._specs[self._num_done] if self._num_done < len(self._specs) else None
        if expected is None or expected.name != name:
            wanted = "nothing more" if expected is None else shown(expected.name)
            raise ValueError(f"{self._path.name} expects {wanted} next, not {shown(name)}")
        return expected

    def _append(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        if tensor.dtype != spec.dtype:
            raise ValueError(f"{shown(spec.name)} needs {spec.dtype}, got {tensor.dtype}")
        data = byte_view(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        if self._position + len(data) > spec.nbytes:
            raise ValueError(f"{shown(spec.name)} takes {spec.nbytes} bytes, got {self._position + len(data)}")
        self._file.seek(self._offsets[spec.name] + self._position)
        self._file.write(data)
        self._position += len(data)
        if self._position == spec.nbytes:
            self._num_done, self._position = self._num_done + 1, 0


def _layout(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the file's first bytes, and where in the file each tensor begins."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begins: dict[str, int] = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        if spec.name in header:
            raise ValueError(f"tensor name {shown(spec.name)} is taken")
        end = position + spec.nbytes
        header[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        begins[spec.name], position = position, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}
