"""Which back ends are live on this machine, and why the others are not."""

from __future__ import annotations

from typing import NamedTuple

from qkv.quantizers.kernels.choose import BACKENDS


class BackendStatus(NamedTuple):
    """A back end: ``reason`` is None when it is live; ``serves`` says what it is for."""

    name: str
    reason: str | None
    serves: str


def status() -> list[BackendStatus]:
    """One row a back end, in the order in which they are tried."""
    return [BackendStatus(name, backend.unavailable(), backend.SERVES) for name, backend in BACKENDS.items()]
