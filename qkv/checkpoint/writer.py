"""A safetensors file written one tensor, or one piece of a tensor, at a time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from qkv.checkpoint.header import DTYPES, checked_nbytes
from qkv.checkpoint.raw import byte_view
from qkv.errors import CheckpointError, shown

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
    """Writes the header first, then each tensor as it comes, so that only what is being written is in memory.

    Tensors come whole or by rows, in any order. In the file the widest dtypes lie first, as safetensors
    itself does it, so that every tensor is aligned for who maps it; within a width the order is that of `specs`.

    >>> with StreamWriter(path, [TensorSpec("a", torch.int8, (2, 3))]) as writer:  # doctest: +SKIP
    ...     writer.write("a", torch.zeros(2, 3, dtype=torch.int8))
    """

    def __init__(
        self,
        path: str | Path,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str] | None = None,
        *,
        keep: bool = False,
        done: Iterable[str] = (),
    ) -> None:
        """Create the file and write its header, or go on with a file that an earlier run left.

        Args:
            path: the file; it may not exist yet, unless `keep`.
            specs: the tensors.
            metadata: of the header; `format: pt` by default.
            keep: leave the file where an error stops the writing, for a later run to go on with.
            done: tensors that are in the file already, from a run with `keep`.

        Raises:
            CheckpointError: `done` names tensors, and the file is not one that these specs begin.
        """
        header, self._offsets = _layout(specs, {"format": "pt"} if metadata is None else metadata)
        self._path, self._keep = Path(path), keep
        self._specs = {spec.name: spec for spec in specs}
        self._written = {name: self._specs[name].nbytes for name in done}
        if self._written and not self._path.is_file():
            raise CheckpointError(f"{path} is gone since the run that began it; run again to begin anew")
        mode = "r+b" if self._written else "w+b" if keep else "xb"
        self._file = self._path.open(mode, buffering=0)
        try:
            if self._written:
                self._check_begun(header)
            else:
                self._put(memoryview(header), 0)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor whole; ValueError unless name, dtype and shape are those of a spec."""
        spec = self._spec(name)
        if self._written.get(name) or tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{shown(name)} needs shape {list(spec.shape)} in one piece, got {list(tensor.shape)}")
        self._append(spec, tensor)

    def write_chunk(self, name: str, rows: torch.Tensor) -> None:
        """Write the next rows (along dimension 0) of a tensor; the last rows complete it."""
        spec = self._spec(name)
        if not spec.shape or tuple(rows.shape[1:]) != spec.shape[1:] or rows.dim() != len(spec.shape):
            raise ValueError(f"rows of {list(rows.shape)} do not fit {shown(name)} of shape {list(spec.shape)}")
        self._append(spec, rows)

    def sync(self) -> None:
        """Put what was written on the disk; another thread may call it while this one writes on."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Check that every tensor is complete and sync the file; ValueError where one is missing."""
        if self._file.closed:
            return
        missing = next((s.name for s in self._specs.values() if self._written.get(s.name, 0) < s.nbytes), None)
        if missing is not None:
            self.abort()
            raise ValueError(f"{self._path.name}: tensor {shown(missing)} was not written in full")
        try:
            self.sync()
            self._file.close()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Close the file, and remove it unless it is to be kept."""
        with contextlib.suppress(OSError):
            self._file.close()
        if not self._keep:
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

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            raise ValueError(f"{self._path.name} has no tensor {shown(name)}")
        return self._specs[name]

    def _append(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        if tensor.dtype != spec.dtype:
            raise ValueError(f"{shown(spec.name)} needs {spec.dtype}, got {tensor.dtype}")
        data = byte_view(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        position = self._written.get(spec.name, 0)
        if position + len(data) > spec.nbytes:
            raise ValueError(f"{shown(spec.name)} takes {spec.nbytes} bytes, got {position + len(data)}")
        self._put(data, self._offsets[spec.name] + position)
        self._written[spec.name] = position + len(data)

    def _put(self, data: memoryview, position: int) -> None:
        self._file.seek(position)
        while data:  # one call to the system writes 2 GB at most
            data = data[self._file.write(data) :]

    def _check_begun(self, header: bytes) -> None:
        end = max((self._offsets[name] + nbytes for name, nbytes in self._written.items()), default=0)
        if self._file.read(len(header)) != header or os.fstat(self._file.fileno()).st_size < end:
            raise CheckpointError(f"{self._path} is not as the run that began it left it; run again to begin anew")


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
