"""Which C files a native library was built from. setup.py runs this file by itself: standard library only."""

from __future__ import annotations

import hashlib
from pathlib import Path


def stamp(sources: Path) -> int | None:
    """A number of 63 bits that changes with the name or the bytes of any C file in a folder; None if there is none."""
    files = sorted(path for path in sources.glob("*.[ch]") if path.is_file())
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
