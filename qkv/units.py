"""How sizes are written for people: GB and MB are 10⁹ and 10⁶ bytes."""

from __future__ import annotations


def format_bytes(nbytes: float) -> str:
    """``1_234_567_890`` as ``"1.23 GB"``; the number has three figures or more."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            value = nbytes / size
            return f"{value:.2f} {unit}" if value < 10 else f"{value:,.1f} {unit}"
    return f"{nbytes:,.0f} B"
