"""What a measurement was made on, and how fast its memory is just now."""

from __future__ import annotations

import platform
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from qkv.quantizers.kernels import native

READ_NBYTES: Final = 64 * 2**20
PACKAGES: Final = ("qkv", "torch", "transformers", "bitsandbytes", "optimum-quanto", "hqq", "torchao")


def describe() -> dict[str, Any]:
    """Processor, threads, kernels and versions: the conditions of a table."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "kernels": native.unavailable() or native.level(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def conditions(machine: dict[str, Any]) -> str:
    """The same in one line."""
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    return f"{machine['processor']}, {machine['threads']} threads, native kernels: {machine['kernels']}; {versions}"


def read_bandwidth() -> float | None:
    """Bytes a second that all threads read, four distant streams each, nothing being computed.

    None without the native library, which does the reading.
    """
    if native.unavailable() is not None:
        return None
    memory = _memory()
    start = time.perf_counter()
    native.read(memory)
    return memory.numel() / (time.perf_counter() - start)


@cache
def _memory() -> Tensor:
    return torch.ones(READ_NBYTES, dtype=torch.uint8)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _version(name: str) -> str | None:
    if name == "qkv":
        from qkv import __version__

        return __version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None
