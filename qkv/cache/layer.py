"""One layer's cache: sealed blocks and an exact tail. The contract that everything above builds on.

A step is ``append → attendable → commit`` (or ``discard``):

``append(keys, values)``  adds new tokens, ``[batch, heads, tokens, dim]``, to the open end of every row.
``attendable()``          says what the step's queries may read: for each row its anchors (sinks, summary),
                          runs of sealed blocks, and tail. ``dense()`` is the same, unpacked.
``observe(...)``          hands in what attention saw of the open tokens' queries; only policies need it.
``commit(kept)``          makes open tokens part of the row: all of them (``None``), the first ``n`` (int),
                          the first ``n[row]`` of each (ints), or the named ones of each row (lists: a path
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

Rows and frame: all rows end at the same column. Row ``r`` begins at column ``start[r]``: what lies before it
is padding. Where rows commit different numbers, the shorter ones move right: their ``start`` grows.
Tensors handed in are kept, not copied, until the commit; nothing here ever writes into one.
Errors: ``QkvError`` for a shape that does not fit, and for a crop into what was evicted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkv.cache import rollback, sharing
from qkv.cache.blocks import Block, BlockLayout, BlockStore
from qkv.cache.choice import Kept, chosen_tokens, keep_tokens
from qkv.cache.codec import Codec
from qkv.cache.observation import Observations
from qkv.cache.row import Row
from qkv.cache.sealing import seal, trim
from qkv.cache.settings import LayerSettings
from qkv.cache.state import layer_state, load_layer_state
from qkv.cache.tail import Tail
from qkv.cache.view import RowView, dense_batch, view_row, visible_tokens
from qkv.errors import QkvError


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
        chosen = chosen_tokens(self, kept)
        if chosen is not None:
            keep_tokens(self, chosen)
        self.observations.commit(self.rows, chosen)
        self.num_open = 0
        for index, row in enumerate(self.rows):
            seal(self, index, row)
            self.settings.retain.settle(row, self)
            row.trim_statistics(-(-(self.row_length(row) - row.sealed) // self.block_size))
        trim(self)

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
        rollback.crop(self, num_tokens)

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
        return sharing.shareable_tokens(self, index)

    def shareable_block(self, index: int, number: int) -> Block:
        """Block ``number`` of a row, with a reference for the caller; if in the tail, it is encoded."""
        return sharing.shareable_block(self, index, number)

    def shareable_sinks(self, index: int) -> list[Block]:
        """The row's exact sinks, with a reference for the caller; none where the policy has none."""
        return sharing.shareable_sinks(self, index)

    def adopt(self, blocks: Sequence[Block], sinks: Block | None) -> None:
        """Fill an empty layer with one row that begins with these blocks, by reference."""
        sharing.adopt(self, blocks, sinks)

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
            layout = BlockLayout(*shape, settings.keys, settings.values, keys.dtype)
            self.store = BlockStore(layout, offload=settings.offload)
        if self._exact is None:
            exact = Codec("exact")
            self._exact = BlockStore(BlockLayout(*shape, exact, exact, keys.dtype))
        self.rows = self.rows or [Row() for _ in range(batch)]
        self.tail = Tail(keys[:, :, :0], values[:, :, :0])
        settings.retain.check(self)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if keys.dim() != 4 or values.shape[:3] != keys.shape[:3]:
            raise QkvError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not [batch, heads, tokens, …]"
            )
        if self.rows and keys.shape[0] != self.batch:
            raise QkvError(f"{keys.shape[0]} rows appended to a cache of {self.batch}; reorder it first, or reset it")
        if self.store is None:
            return
        layout = self.store.layout
        expected = (layout.heads, layout.key_dim, layout.value_dim, layout.dtype)
        found = (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        if found != expected:
            raise QkvError(
                f"heads, widths and dtype {found} do not fit a cache of {expected}; reset it, or make another"
            )

    def first_column(self, row: Row) -> int:
        """Column of the tail at which a row's own tokens begin."""
        assert self.tail is not None
        return row.start + row.sealed - (self.seen - self.tail.columns)
