"""Keep every token."""

from __future__ import annotations

from dataclasses import dataclass

from qkv.cache.retention.base import Shape
from qkv.cache.rotation import Rotation
from qkv.cache.row import Row

UNBOUNDED = 2**31


@dataclass(frozen=True)
class KeepAll:
    """Nothing is ever evicted. Also the base of the other policies: what a policy leaves out, it inherits."""

    @property
    def sinks(self) -> int:
        return 0

    @property
    def reach(self) -> int | None:
        return None

    @property
    def needs_mass(self) -> bool:
        return False

    @property
    def num_observed(self) -> int:
        return 0

    @property
    def half_life(self) -> float:
        return 1.0

    @property
    def is_bounded(self) -> bool:
        return False

    @property
    def size_of_window(self) -> int:
        return UNBOUNDED

    def turns(self, query: int, rotation: Rotation | None) -> bool:
        return False

    def check(self, layer: Shape) -> None:
        """Always possible."""

    def settle(self, row: Row, layer: Shape) -> None:
        """Nothing to decide."""

    def room(self, row: Row, layer: Shape) -> int:
        return UNBOUNDED


@dataclass(frozen=True)
class Masked(KeepAll):
    """A sliding-window layer whose blocks all stay, so that any prefix of them can be shared.

    Args:
        size: newest tokens a query sees, itself included.
    """

    size: int = 1

    @property
    def reach(self) -> int | None:
        return self.size
