"""One layer's cache: sealed blocks and an exact tail. The contract that everything above builds on.

A step is ``append → attendable → commit`` (or ``discard``):

``append(keys, values)``  adds new tokens, ``[batch, heads, tokens, dim]``, to the open end of every row.
``attendable()``          says what the step's queries may read: for each row its anchors (sinks, summary),
                          runs of sealed blocks, and tail. ``dense()`` is the same, unpacked.
``observe(...)``          hands in what attention saw of the open tokens' queries; only policies need it.
``commit(kept)``          makes open tokens part of the row: all of them (``None``), the first ``n`` (int), the
                          first ``n[row]`` of each (ints), or the named ones of each row (lists: a path
                          through a tree). The others leave no trace. Then, and only then, full blocks are
                          sealed and the retention policy acts.
``discard()``             forgets every open token.

What is asked: ``room()`` is how many tokens one step may append so that each of them attends to exactly
what it would have attended to, had they come one at a time. It is at least 1, and exact: one more token
than that would see a block before it is sealed (or evicted) that it should have seen after.
``len`` counts the tokens seen, in frame columns (padding included: the label of the next token);
``lengths`` the real tokens of each row (the position of its next one); ``num_held`` the tokens of the
fullest row that are still held; ``nbytes`` the storages held, metadata included.

What moves: ``reorder(rows)`` makes row i a copy of row ``rows[i]`` (beams, repeats, selections: any length);
``fork()`` is an independent copy; both move table entries and counts only. ``crop(n)`` takes back the newest
``n`` committed or open tokens; where these are sealed, their block is opened again (decoded into the tail).
``state`` / ``load_state`` are plain tensors and plain metadata.

Laws: (1) what is held after n committed tokens depends on those tokens, the settings and the prefill chunks
alone; a block is encoded once, when full and committed, at absolute positions. (2) Nothing uncommitted ever
changes a sealed block, a statistic, or a decision. (3) ``nbytes`` is the sum of the storages really held.
(4) A block that others share is never written; references are conserved and blocks freed at zero.
(5) Every stored token keeps its position; padding is never attended, scored, or put into a group.

Rows and frame: all rows end at the same column. Row ``r`` begins at column ``start[r]``: what lies before it is
padding. Where rows commit different numbers, the shorter ones move right: their ``start`` grows.
Tensors handed in are kept, not copied, until the commit; nothing here ever writes into one.
Errors: ``QkvError`` for a shape that does not fit, and for a crop into what was evicted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qkv.cache.blocks import Block, BlockLayout, BlockStore
from qkv.cache.codec import Codec
from qkv.cache.observation import Observations
from qkv.cache.row import Row
from qkv.cache.settings import LayerSettings
from qkv.cache.state import layer_state, load_layer_state
from qkv.cache.tail import Tail
from qkv.cache.view import RowView, dense_batch, view_row, visible_tokens
from qkv.errors import QkvError

Kept = int | Sequence[int] | Sequence[Sequence[int]] | None


class CacheLayer:
    """See the module's docstring for the contract.

    Args:
        settings: codecs, sizes and policy.
        store: a block store to share with other caches; made at the first ``append`` otherwise.
        exact: likewise for sinks and summaries.
    """

    def __init__(
        self, settings: LayerSettings, *, store: BlockStore | None = None, exact: BlockStore | None = None
    ) -> None:
        self.settings = settings
        self.store, self._exact = store, exact
        self.rows: list[Row] = []
        self.tail: Tail | None = None
        self.num_open = 0
        self.seen = 0
        self.observations = Observations(settings.retain.num_observed, settings.retain.half_life)

    # --- what is asked -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.seen

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row, open ones included."""
        return [max(0, self.seen - row.start) for row in self.rows]

    def row_length(self, row: Row) -> int:
        """Real committed tokens of a row."""
        return max(0, self.seen - self.num_open - row.start)

    @property
    def num_held(self) -> int:
        """Tokens that the fullest row holds, open ones included."""
        held = [row.held_tokens(self.row_length(row)) for row in self.rows]
        return max(held, default=0) + self.num_open

    @property
    def nbytes(self) -> int:
        """Bytes of every storage this layer keeps alive: shared blocks once, statistics counted."""
        blocks = {id(block): block for row in self.rows for block in row}
        total = sum(block.nbytes for block in blocks.values())
        statistics = [t for row in self.rows for t in (row.mass, row.focus, row.summary_weights) if t is not None]
        total += sum(t.untyped_storage().nbytes() for t in statistics)
        return total + self.observations.nbytes + (self.tail.nbytes if self.tail is not None else 0)

    def room(self) -> int:
        """Tokens one step may append without meeting a seal or a decision (exact; at least 1)."""
        settings = self.settings
        full = settings.residual + settings.block_size
        tails = [self.row_length(row) - row.sealed for row in self.rows]
        rooms = [settings.retain.room(row, self) for row in self.rows]
        return max(1, min([full - max(tails, default=0), *rooms]) - self.num_open)

    # --- a step ------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, *, starts: Sequence[int] | None = None) -> None:
        """Add open tokens.

        Args:
            keys: ``[batch, heads, tokens, key_dim]``, at their positions (rotated); ``values`` likewise.
            starts: frame column of each row's first real token, where known; rows that have sealed
                something keep theirs.
        """
        self._check(keys, values)
        if self.tail is None:
            self._begin(keys, values)
        assert self.tail is not None
        self.tail.append(keys, values)
        self.num_open += keys.shape[2]
        self.seen += keys.shape[2]
        for row, start in zip(self.rows, starts or (), strict=False):
            if row.sealed == 0 and start is not None:
                row.start = max(0, min(start, self.seen))

    def attendable(self) -> list[RowView]:
        """What each row's open queries may read."""
        return [view_row(self, index) for index in range(self.batch)]

    def dense(self) -> tuple[Tensor, Tensor]:
        """The same unpacked: keys and values ``[batch, heads, tokens, dim]``, open tokens last.

        Raises:
            QkvError: rows whose held tokens do not line up under one mask (padding with eviction).
        """
        return dense_batch(self)

    def visible(self) -> int:
        """Committed tokens that the next query of the fullest row may see: the length of ``dense`` before."""
        counts = [visible_tokens(self, row) for row in self.rows]
        return max(counts, default=0) if self.is_ragged else self.seen - self.num_open

    @property
    def is_ragged(self) -> bool:
        """Whether some committed tokens are no longer visible, so that columns and tokens part."""
        return any(visible_tokens(self, row) < self.row_length(row) for row in self.rows)

    def observe(self, row: int, mass: Tensor | None, focus: Tensor | None, queries: Tensor | None) -> None:
        """What the open queries saw: ``mass`` and ``focus`` ``[tokens, blocks]`` (sealed, then those of the
        tail), ``queries`` ``[heads, group, tokens, dim]``. Counts once committed."""
        self.observations.add(row, self.batch, mass, focus, queries)

    def observed_queries(self, row: Row) -> Tensor | None:
        """The newest committed queries of a row, ``[heads, group, n, dim]``."""
        return self.observations.queries(self.rows.index(row))

    def commit(self, kept: Kept = None) -> None:
        """Close the step: see the module's docstring."""
        if self.tail is None:
            return
        chosen = self._chosen(kept)
        if chosen is None:
            chosen_count = [self.num_open] * self.batch
        else:
            chosen_count = [len(row) for row in chosen]
            self._keep(chosen)
        self.observations.commit(self.rows, chosen, self.num_open if chosen is None else max(chosen_count))
        self.num_open = 0
        for index, row in enumerate(self.rows):
            self._seal(index, row)
            self.settings.retain.settle(row, self)
        self._trim()

    def discard(self) -> None:
        """Forget every open token."""
        if self.tail is not None:
            self.tail.cut(self.num_open)
        self.seen -= self.num_open
        self.num_open = 0
        self.observations.discard()

    # --- what moves --------------------------------------------------------------------------------------

    def crop(self, num_tokens: int) -> None:
        """Take back the newest ``num_tokens`` columns, all of them if there are fewer; open ones first.

        Raises:
            QkvError: what lies there was evicted; nothing has changed then.
        """
        if num_tokens >= self.seen:
            return self.reset()
        from_open = min(num_tokens, self.num_open)
        committed = num_tokens - from_open
        target = self.seen - num_tokens
        if committed:
            self._check_crop(target)
        self._cut(from_open)
        if committed:
            self._reopen(target)
            assert self.tail is not None
            self.tail.cut(committed)
            self.seen -= committed
            self.observations.discard()

    def reset(self) -> None:
        """Empty the layer and give its blocks back; settings and stores stay."""
        for row in self.rows:
            row.release()
        self.rows, self.tail, self.num_open, self.seen = [], None, 0, 0
        self.observations.clear()

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row i becomes a copy of row ``rows[i]``."""
        if self.tail is None:
            return
        order = torch.as_tensor(rows, dtype=torch.long).flatten().tolist()
        if not order or min(order) < 0 or max(order) >= self.batch:
            raise QkvError(f"rows {order} do not all lie within the cache's {self.batch} rows")
        new = [self.rows[i].fork() for i in order]
        for row in self.rows:
            row.release()
        self.rows = new
        self.tail = self.tail.select(torch.tensor(order))
        self.observations.select(order)
        self.settings.retain.check(self)
        if self.num_open == 0:
            for row in self.rows:
                self.settings.retain.settle(row, self)

    # --- what is shared ----------------------------------------------------------------------------------

    def shareable_tokens(self, index: int) -> int:
        """Tokens of a row, from its first, that were computed with nothing hidden and are all still held."""
        row, size = self.rows[index], self.settings.block_size
        whole = 0
        while whole < len(row.blocks) and row.blocks[whole].start == whole * size:
            whole += 1
        held = self.row_length(row) if row.sealed == whole * size else whole * size
        return held if row.pure is None else min(row.pure, held)

    def shareable_block(self, index: int, number: int) -> Block:
        """Block ``number`` of a row, with a reference for the caller; one still in the tail is encoded now."""
        row, size = self.rows[index], self.settings.block_size
        if number < len(row.blocks):
            block = row.blocks[number]
            return block.store.share(block)
        assert self.tail is not None and self.store is not None
        first = self.first_column(row) + number * size - row.sealed
        keys, values = (t[index, :, first : first + size] for t in (self.tail.keys, self.tail.values))
        return self.store.put(_to_blocks(keys, size), _to_blocks(values, size), [number * size])[0]

    def shareable_sinks(self, index: int) -> list[Block]:
        """The row's exact sinks, with a reference for the caller; none where the policy has none."""
        row, wanted = self.rows[index], self.settings.retain.sinks
        if not wanted:
            return []
        if row.sinks is not None and row.sinks.num_tokens == wanted:
            return [row.sinks.store.share(row.sinks)]
        assert self.tail is not None
        first = self.first_column(row) - row.sealed
        keys, values = (t[None, index, :, first : first + wanted] for t in (self.tail.keys, self.tail.values))
        return self.exact_store().put(keys, values, [0])

    def adopt(self, blocks: Sequence[Block], sinks: Block | None) -> None:
        """Fill an empty layer with one row that begins with these blocks; they are referred to, not copied."""
        if self.seen or not blocks:
            raise QkvError("blocks are adopted by an empty layer, at least one of them")
        self.store = blocks[0].store
        layout = self.store.layout
        exact = Codec("exact")
        self._exact = self._exact or BlockStore(replace(layout, keys=exact, values=exact))
        row = Row(sealed=blocks[-1].end, blocks=[block.store.share(block) for block in blocks])
        if sinks is not None:
            row.sinks = sinks.store.share(sinks)
        self.rows, self.seen = [row], row.sealed
        device = next(iter(blocks[0].slab.tensors.values())).device
        keys = torch.empty(1, layout.heads, 0, layout.key_dim, dtype=layout.dtype, device=device)
        self.tail = Tail(keys, keys.new_empty(1, layout.heads, 0, layout.value_dim))
        self.settings.retain.check(self)
        self.settings.retain.settle(row, self)

    def fork(self) -> CacheLayer:
        """An independent layer over the same blocks."""
        other = CacheLayer(self.settings, store=self.store, exact=self._exact)
        other.rows = [row.fork() for row in self.rows]
        other.num_open, other.seen = self.num_open, self.seen
        other.tail = Tail(self.tail.keys, self.tail.values) if self.tail is not None else None
        other.observations = self.observations.copy()
        return other

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything held, as plain tensors and plain (JSON) metadata; open tokens are not part of it."""
        return layer_state(self)

    def load_state(self, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """Undo :meth:`state`, into an empty layer of the same settings.

        Raises:
            QkvError: tensors that do not fit the settings.
        """
        load_layer_state(self, tensors, metadata)

    def to(self, device: torch.device | str) -> None:
        """Move what this layer holds; stores move whole."""
        for store in (self.store, self._exact):
            if store is not None:
                store.to(device)
        if self.tail is not None:
            self.tail.to(device)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        for row in getattr(self, "rows", ()):
            row.release()

    # --- what policies may know --------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        return self.settings.block_size

    @property
    def residual(self) -> int:
        return self.settings.residual

    @property
    def block_nbytes(self) -> int:
        """Bytes of one sealed block."""
        assert self.store is not None
        return self.store.layout.nbytes()

    @property
    def token_nbytes(self) -> int:
        """Bytes of one exact token."""
        layout = self.exact_store().layout
        return layout.heads * (layout.key_dim + layout.value_dim) * layout.dtype.itemsize

    @property
    def byte_share(self) -> int | None:
        """Bytes a row may hold in this layer."""
        budget = self.settings.byte_budget
        return None if budget is None else budget // max(self.batch, 1)

    @property
    def token_share(self) -> float:
        return self.settings.token_share

    def exact_store(self) -> BlockStore:
        """The store of sinks and summaries."""
        assert self._exact is not None
        return self._exact

    # --- inside ------------------------------------------------------------------------------------------

    def _begin(self, keys: Tensor, values: Tensor) -> None:
        batch, heads, _, key_dim = keys.shape
        settings = self.settings
        shape = (heads, key_dim, values.shape[3], settings.block_size)
        if self.store is None:
            self.store = BlockStore(BlockLayout(*shape, settings.keys, settings.values, keys.dtype))
        if self._exact is None:
            exact = Codec("exact")
            self._exact = BlockStore(BlockLayout(*shape, exact, exact, keys.dtype))
        self.rows = self.rows or [Row() for _ in range(batch)]
        self.tail = Tail(keys[:, :, :0], values[:, :, :0])
        settings.retain.check(self)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if keys.dim() != 4 or values.shape[:3] != keys.shape[:3]:
            raise QkvError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not both [batch, heads, tokens, dim]"
            )
        if self.rows and keys.shape[0] != self.batch:
            raise QkvError(f"{keys.shape[0]} rows appended to a cache of {self.batch}; reorder it first, or reset it")
        if self.store is None:
            return
        layout = self.store.layout
        expected = (layout.heads, layout.key_dim, layout.value_dim, layout.dtype)
        found = (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        if found != expected:
            raise QkvError(f"heads, widths and dtype {found} do not fit a cache of {expected}; reset it, or make another")

    def _chosen(self, kept: Kept) -> list[list[int]] | None:
        """Open tokens to keep of each row; None for all of them."""
        if kept is None:
            return None
        counts = [kept] * self.batch if isinstance(kept, int) else list(kept)
        chosen = [list(range(row)) if isinstance(row, int) else list(row) for row in counts]
        last = max((max(row, default=-1) for row in chosen), default=-1)
        if len(chosen) != self.batch or last >= self.num_open or any(i < 0 for row in chosen for i in row):
            raise QkvError(f"commit of {kept!r} does not fit {self.num_open} open tokens in {self.batch} rows")
        return None if all(len(row) == self.num_open for row in chosen) and _in_order(chosen) else chosen

    def _keep(self, chosen: list[list[int]]) -> None:
        assert self.tail is not None
        width = max(len(row) for row in chosen)
        if all(len(row) == width for row in chosen) and _in_order(chosen):
            self.tail.cut(self.num_open - width)
        else:
            self.tail.keep(self.num_open, chosen)
        for row, kept in zip(self.rows, chosen, strict=True):
            row.start += width - len(kept)
        self.seen -= self.num_open - width

    def _cut(self, columns: int) -> None:
        if columns and self.tail is not None:
            self.tail.cut(columns)
            self.observations.cut(columns)
            self.num_open -= columns
            self.seen -= columns

    def first_column(self, row: Row) -> int:
        """Column of the tail at which a row's own tokens begin."""
        assert self.tail is not None
        return row.start + row.sealed - (self.seen - self.tail.columns)

    def _seal(self, index: int, row: Row) -> None:
        """Encode every full block that the residual window has left behind."""
        assert self.tail is not None and self.store is not None
        size = self.settings.block_size
        count = (self.row_length(row) - row.sealed - self.settings.residual) // size
        while count > 0:
            part = min(count, self.store.slab_blocks)
            first = self.first_column(row)
            columns = slice(first, first + part * size)
            keys, values = self.tail.keys[index, :, columns], self.tail.values[index, :, columns]
            self._keep_sinks(row, keys, values)
            starts = range(row.sealed, row.sealed + part * size, size)
            row.blocks += self.store.put(_to_blocks(keys, size), _to_blocks(values, size), starts)
            row.sealed += part * size
            count -= part

    def _keep_sinks(self, row: Row, keys: Tensor, values: Tensor) -> None:
        """Sinks leaving the tail stay exact, in a block of their own."""
        have = row.num_hidden
        missing = min(self.settings.retain.sinks, row.sealed + keys.shape[1]) - have
        if missing <= 0 or row.sealed > have:
            return
        keys, values = keys[None, :, :missing], values[None, :, :missing]
        old = row.sinks
        if old is not None:
            old_keys, old_values = old.store.decode(old)
            keys, values = torch.cat((old_keys[None], keys), 2), torch.cat((old_values[None], values), 2)
        row.sinks = self.exact_store().put(keys, values, [0])[0]
        if old is not None:
            old.store.drop(old)

    def _trim(self) -> None:
        assert self.tail is not None
        first = min(min(self.first_column(row), self.tail.columns) for row in self.rows)
        self.tail.trim(self.tail.columns - max(first, 0))

    def _check_crop(self, target: int) -> None:
        """Refuse before anything changes."""
        for row in self.rows:
            length = max(0, target - row.start)
            reach = self.settings.retain.reach
            lost = row.dropped > (length - reach + 1 if reach is not None else 0 if length < row.sealed else length)
            if length and lost:
                raise QkvError(
                    f"cannot crop to {length} tokens: tokens up to {row.dropped} were evicted; "
                    "call activate_past_recording before appending what may be taken back"
                )

    def _reopen(self, target: int) -> None:
        """Decode the newest blocks back into the tail, until every row's table ends at or before ``target``."""
        assert self.tail is not None
        for index, row in enumerate(self.rows):
            length = max(0, target - row.start)
            if length == 0:
                self.rows[index] = row = self._emptied(row)
            while row.blocks and row.sealed > length:
                block: Block = row.blocks.pop()
                self.tail.prepend(index, *block.store.decode(block), first=self.first_column(row))
                row.sealed = block.start
                block.store.drop(block)
            self._shorten_sinks(row)
            if row.sealed == 0 and target < row.start:
                row.start = target


    def _emptied(self, row: Row) -> Row:
        """A row without tokens in place of one whose table goes."""
        row.release()
        return Row(start=min(row.start, self.seen), sealed=0)

    def _shorten_sinks(self, row: Row) -> None:
        """Sinks that are in the tail again leave their block."""
        old = row.sinks
        if old is None or old.num_tokens <= row.sealed:
            return
        keys, values = (t[None, :, : row.sealed] for t in old.store.decode(old))
        row.sinks = self.exact_store().put(keys, values, [0])[0] if row.sealed else None
        old.store.drop(old)


def _to_blocks(x: Tensor, size: int) -> Tensor:
    """``[heads, tokens, dim]`` to ``[blocks, heads, size, dim]``."""
    return x.unflatten(1, (-1, size)).transpose(0, 1)


def _in_order(chosen: list[list[int]]) -> bool:
    return all(row == list(range(len(row))) for row in chosen)
