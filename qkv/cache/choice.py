"""Which open tokens a commit keeps: all, a number of them, or a path of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer

Kept = Union[int, Sequence[int], Sequence[Sequence[int]], None]  # noqa: UP007 (evaluated at run time)


def chosen_tokens(layer: CacheLayer, kept: Kept) -> list[list[int]] | None:
    """Open tokens to keep of each row; None for all of them."""
    if kept is None:
        return None
    counts: list[Any] = [kept] * layer.batch if isinstance(kept, int) else list(kept)
    chosen = [list(range(row)) if isinstance(row, int) else list(row) for row in counts]
    last = max((max(row, default=-1) for row in chosen), default=-1)
    if len(chosen) != layer.batch or last >= layer.num_open or any(i < 0 for row in chosen for i in row):
        raise QkvError(f"commit of {kept!r} does not fit {layer.num_open} open tokens in {layer.batch} rows")
    return None if all(len(row) == layer.num_open for row in chosen) and _in_order(chosen) else chosen


def keep_tokens(layer: CacheLayer, chosen: list[list[int]]) -> None:
    """Drop the other open tokens; shorter rows move right, so that all end at one column again."""
    assert layer.tail is not None
    width = max(len(row) for row in chosen)
    if all(len(row) == width for row in chosen) and _in_order(chosen):
        layer.tail.cut(layer.num_open - width)
    else:
        layer.tail.keep(layer.num_open, chosen)
    for row, kept in zip(layer.rows, chosen, strict=True):
        row.start += width - len(kept)
    layer.seen -= layer.num_open - width


def _in_order(chosen: list[list[int]]) -> bool:
    return all(row == list(range(len(row))) for row in chosen)
