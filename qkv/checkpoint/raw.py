"""A tensor's bytes, whatever its dtype, and how they come from a file."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import torch

from qkv.quantizers.kernels import native


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor, without a copy; 0-d and empty tensors too."""
    # Not view(-1): a contiguous tensor's dimension of size 1 may have any stride; view(dtype) refuses it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def read_into(path: Path, offset: int, tensor: torch.Tensor) -> bool:
    """Fill a contiguous CPU tensor with the bytes of a file from ``offset`` on, by several threads where that can be.

    Returns:
        Whether the file has so many bytes.

    Raises:
        OSError: what the system says.
    """
    with path.open("rb", buffering=0) as file:
        if native.unavailable() is not None or os.name != "posix":
            return _read_alone(file, offset, tensor)
        where, threads = tensor.data_ptr(), torch.get_num_threads()
        error = native.library().qkv_read_file(file.fileno(), offset, where, tensor.nbytes, threads)
    if error > 0:
        raise OSError(error, os.strerror(error), str(path))
    return not error


def _read_alone(file: FileIO, offset: int, tensor: torch.Tensor) -> bool:
    data = byte_view(tensor)
    file.seek(offset)
    while data and (num_read := file.readinto(data)):  # one call to the system reads 2 GB at most
        data = data[num_read:]
    return not data
