"""Tensors that are windows into a mapped file keep the whole file resident; give them memory of their own."""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
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
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and _is_mapped(parameter, ranges):
                parameter.data = _copy(parameter.data, copies)
        for name, buffer in module._buffers.items():
            if buffer is not None and _is_mapped(buffer, ranges):
                module._buffers[name] = _copy(buffer, copies)  # a new object: the old one may hold its base
    return sum(copy.nbytes for copy in copies.values())


def _copy(tensor: Tensor, copies: dict[tuple[object, ...], Tensor]) -> Tensor:
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key not in copies:
        copies[key] = tensor.detach().clone()
    return copies[key]


def return_freed_memory() -> None:
    """Ask glibc to give freed pages back to the system; elsewhere the allocator does so by itself."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


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


def _is_mapped(tensor: Tensor, ranges: list[tuple[int, int]] | None) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > 0 and _inside(tensor.data_ptr(), ranges)


def _inside(address: int, ranges: list[tuple[int, int]] | None) -> bool:
    if ranges is None:
        return True
    index = bisect_right(ranges, (address, sys.maxsize)) - 1
    return index >= 0 and ranges[index][0] <= address < ranges[index][1]
