"""Retention policies: what of a row stays. Each is a frozen value; :data:`RETENTIONS` names them."""

from __future__ import annotations

from typing import Final

from qkv.cache.retention.base import Retention
from qkv.cache.retention.importance import Importance
from qkv.cache.retention.keep_all import KeepAll, Masked
from qkv.cache.retention.random_blocks import RandomBlocks
from qkv.cache.retention.window import Window

RETENTIONS: Final[dict[str, type[KeepAll]]] = {
    "keep_all": KeepAll,
    "masked": Masked,
    "window": Window,
    "importance": Importance,
    "random": RandomBlocks,
}

__all__ = ["RETENTIONS", "Importance", "KeepAll", "Masked", "RandomBlocks", "Retention", "Window"]
