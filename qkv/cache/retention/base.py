"""What a retention policy may decide: which sealed blocks a row still needs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from qkv.cache.rotation import Rotation
from qkv.cache.row import Row


class Shape(Protocol):
    """What a policy may know of the layer it decides for."""

    @property
    def block_size(self) -> int: ...
    @property
    def residual(self) -> int: ...
    @property
    def block_nbytes(self) -> int: ...
    @property
    def token_nbytes(self) -> int: ...
    @property
    def byte_share(self) -> int | None: ...
    @property
    def token_share(self) -> float: ...
    def row_length(self, row: Row) -> int: ...


@runtime_checkable
class Retention(Protocol):
    """Decides after a step what stays.

    ``sinks``: first tokens that stay exact and visible for ever. ``reach``: newest tokens a query sees,
    itself included (None: all that is held). ``needs_mass``: whether attention mass should be observed.
    """

    @property
    def sinks(self) -> int: ...
    @property
    def reach(self) -> int | None: ...
    @property
    def needs_mass(self) -> bool: ...
    @property
    def num_observed(self) -> int: ...
    @property
    def half_life(self) -> float: ...
    @property
    def is_bounded(self) -> bool: ...
    @property
    def size_of_window(self) -> int: ...

    def turns(self, query: int, rotation: Rotation | None) -> bool:
        """Whether sinks and summary must be turned for a query at this position."""

    def check(self, layer: Shape) -> None:
        """Raise QkvError where the policy cannot be kept with this layer."""

    def settle(self, row: Row, layer: Shape) -> None:
        """Evict or merge blocks of ``row``, whose tokens are all committed."""

    def room(self, row: Row, layer: Shape) -> int:
        """Tokens that one step may append before the policy would have acted between two of them."""
