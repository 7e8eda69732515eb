"""Taking back the newest tokens: open ones vanish, sealed ones are decoded into the tail again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv.cache.blocks import Block
from qkv.cache.row import Row
from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer


def crop(layer: CacheLayer, num_tokens: int) -> None:
    """Take back the newest ``num_tokens`` columns, all of them if there are fewer; open ones first.

    Raises:
        QkvError: what lies there was evicted; nothing has changed then.
    """
    if num_tokens >= layer.seen:
        return layer.reset()
    from_open = min(num_tokens, layer.num_open)
    committed = num_tokens - from_open
    target = layer.seen - num_tokens
    if committed:
        _check_crop(layer, target)
    _cut(layer, from_open)
    if committed:
        _reopen(layer, target)
        assert layer.tail is not None
        layer.tail.cut(committed)
        layer.seen -= committed
        layer.observations.discard()


def _check_crop(layer: CacheLayer, target: int) -> None:
    """Refuse before anything changes."""
    for row in layer.rows:
        length = max(0, target - row.start)
        reach = layer.settings.retain.reach
        lost = row.dropped > (length - reach + 1 if reach is not None else 0 if length < row.sealed else length)
        if length and lost:
            raise QkvError(
                f"cannot crop to {length} tokens: tokens up to {row.dropped} were evicted; "
                "call activate_past_recording before appending what may be taken back"
            )


def _cut(layer: CacheLayer, columns: int) -> None:
    if columns and layer.tail is not None:
        layer.tail.cut(columns)
        layer.observations.cut(columns)
        layer.num_open -= columns
        layer.seen -= columns


def _reopen(layer: CacheLayer, target: int) -> None:
    """Decode the newest blocks back into the tail, until every row's table ends at or before ``target``."""
    assert layer.tail is not None
    for index, row in enumerate(layer.rows):
        length = max(0, target - row.start)
        if length == 0:
            layer.rows[index] = row = _emptied(layer, row)
        while row.blocks and row.sealed > length:
            block: Block = row.blocks.pop()
            layer.tail.prepend(index, *block.store.decode(block), first=layer.first_column(row))
            row.sealed = block.start
            block.store.drop(block)
        _shorten_sinks(layer, row)
        if row.sealed == 0 and target < row.start:
            row.start = target


def _emptied(layer: CacheLayer, row: Row) -> Row:
    """A row without tokens in place of one whose table goes."""
    row.release()
    return Row(start=min(row.start, layer.seen), sealed=0)


def _shorten_sinks(layer: CacheLayer, row: Row) -> None:
    """Sinks that are in the tail again leave their block."""
    old = row.sinks
    if old is None or old.num_tokens <= row.sealed:
        return
    keys, values = (t[None, :, : row.sealed] for t in old.store.decode(old))
    row.sinks = layer.exact_store().put(keys, values, [0])[0] if row.sealed else None
    old.store.drop(old)
