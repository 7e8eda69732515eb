"""The layouts that checkpoints are written in and read from, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qkv.checkpoint.layouts.base import Layout
from qkv.checkpoint.layouts.bnb import Bitsandbytes
from qkv.checkpoint.layouts.compressed_tensors import CompressedTensors
from qkv.checkpoint.layouts.own import Own
from qkv.errors import QkvError, shown

LAYOUTS: Final[Mapping[str, Layout]] = {
    "qkv": Own(),
    "bnb": Bitsandbytes(),
    "compressed-tensors": CompressedTensors(),
}
"""Every layout by the name that ``--layout`` takes."""


def layout_named(name: str) -> Layout:
    """The layout of that name.

    Raises:
        QkvError: there is none.
    """
    if name not in LAYOUTS:
        raise QkvError(f"unknown layout {shown(name)}; choose from {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
