"""Tensors that are windows into a mapped file keep the whole file resident; give them memory of their own."""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

_MAPS = Path("/proc/self/maps")


def detach_from_files(model: nn.Module) -> int:
    """Copy every parameter and buffer that lies in a mapped file, in place; equal views of it stay tied.

    Returns:
        Bytes that were copied.
    """
    ranges = _mapped_ranges()
    copies: dict[tuple[object, ...], Tensor] = {}
    for tensor in _tensors(model):
        if tensor.device.type != "cpu" or not tensor.numel() or not _inside(tensor.data_ptr(), ranges):
            continue
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            copies[key] = tensor.data.clone()
        tensor.data = copies[key]
    return sum(copy.nbytes for copy in copies.values())


def return_freed_memory() -> None:
    """Ask glibc to give freed pages back to the system; elsewhere the allocator does so by itself."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _tensors(model: nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _mapped_ranges() -> list[tuple[int, int]] | None:
    """Address ranges of this process that are files, sorted; None where the system does not tell."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return None
    ranges = []
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and fields[4] != "0":
            start, end = (int(part, 16) for part in fields[0].split("-"))
            ranges.append((start, end))
    return sorted(ranges)


def _inside(address: int, ranges: list[tuple[int, int]] | None) -> bool:
    if ranges is None:
        return True
    index = bisect_right(ranges, (address, sys.maxsize)) - 1
    return index >= 0 and ranges[index][0] <= address < ranges[index][1]
