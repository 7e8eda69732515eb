"""Length policies by name: a number, ``"fixed"``, ``"adaptive"``, or an object of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkv.errors import QkvError, shown
from qkv.integration.length.adaptive import Adaptive
from qkv.integration.length.base import Length, Outcome
from qkv.integration.length.fixed import Fixed

LENGTHS: dict[str, Callable[[], Length]] = {"fixed": Fixed, "adaptive": Adaptive}

__all__ = ["LENGTHS", "Adaptive", "Fixed", "Length", "Outcome", "make_length"]


def make_length(length: Any) -> Length:
    """A policy of a number of tokens, a name, or itself.

    Raises:
        QkvError: neither of these.
    """
    if isinstance(length, int):
        return Fixed(length)
    if isinstance(length, str) and length in LENGTHS:
        return LENGTHS[length]()
    if not isinstance(length, str) and isinstance(length, Length):
        return length
    raise QkvError(f"length {shown(length)} is neither a number of tokens, nor {', '.join(LENGTHS)}, nor a Length")
