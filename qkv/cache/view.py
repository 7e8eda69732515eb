"""What a step may read of a layer: row by row as runs of blocks, or unpacked for any attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv.cache.blocks import Block, BlockLayout, decode_slots, fetched
from qkv.cache.rotation import Rotation
from qkv.cache.row import Row
from qkv.cache.table import BlockTable, find_neighbours
from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks read as one: views ``[blocks, ...]`` of a slab, never copies.

    Args:
        layout: shapes and codecs.
        tensors: ``{"keys.codes": ..., ...}``.
        starts: position of each block's first token.
    """

    layout: BlockLayout
    tensors: dict[str, Tensor]
    starts: tuple[int, ...]

    def on(self, device: torch.device) -> Run:
        """The run where it is to be read: itself, or a copy of this tile of an offloaded layer."""
        return (
            self
            if self.tensors["keys.codes"].device == device
            else replace(self, tensors=fetched(self.tensors, device))
        )


@dataclass(frozen=True)
class RowView:
    """What the open queries of one row may read.

    Args:
        anchors: exact keys and values ``[heads, anchors, dim]`` that every query sees, and the positions of
            the keys: sinks, then summary.
        anchor_turn: where anchors must be turned, their rotation at the first open query, ``[anchors]``;
            each later query sees them turned by one more position.
        anchor_lead: positions by which the first anchor is turned at the first open query, negative while
            the window has not yet left it behind.
        blocks: sealed blocks, in the order of the table; ``table`` knows where they lie.
        tail_keys: ``[heads, tokens, dim]``, exact, the open tokens last; ``tail_values`` likewise.
        tail_start: position of the tail's first token.
        num_open: open tokens.
        hidden: block tokens below this position are not read (they are among the anchors).
        sinks: tail tokens below this position are always seen.
        reach: newest tokens a query sees, itself included; None for all.
        rotation: what ``anchor_turn`` refers to.
    """

    anchors: tuple[Tensor, Tensor] | None
    anchor_turn: Tensor | None
    anchor_lead: int
    blocks: tuple[Block, ...]
    table: BlockTable
    tail_keys: Tensor
    tail_values: Tensor
    tail_start: int
    num_open: int
    hidden: int
    sinks: int
    reach: int | None
    rotation: Rotation | None

    @cached_property
    def runs(self) -> list[Run]:
        """The blocks as tensors, neighbours together."""
        return find_runs(self.blocks)

    @property
    def first_query(self) -> int:
        """Position of the first open token."""
        return self.tail_start + self.tail_keys.shape[1] - self.num_open


def view_row(layer: CacheLayer, index: int) -> RowView:
    """What row ``index`` of a layer offers to its open queries."""
    row, tail, retain = layer.rows[index], layer.tail, layer.settings.retain
    assert tail is not None
    first = min(max(layer.first_column(row), 0), tail.columns)
    anchors, positions = _anchors(row)
    turn, lead = None, 0
    if anchors is not None and retain.turns(layer.row_length(row), layer.settings.rotation):
        turn = _turn(positions, layer.row_length(row), retain.size_of_window, anchors[0].device)
        lead = layer.row_length(row) - retain.size_of_window + 1 - len(positions) - positions[0]
    return RowView(
        anchors=anchors,
        anchor_turn=turn,
        anchor_lead=lead,
        blocks=tuple(row.blocks),
        table=row.table,
        tail_keys=tail.keys[index, :, first:],
        tail_values=tail.values[index, :, first:],
        tail_start=row.sealed,
        num_open=min(layer.num_open, tail.columns - first),
        hidden=row.num_hidden,
        sinks=retain.sinks,
        reach=retain.reach,
        rotation=layer.settings.rotation,
    )


def find_runs(blocks: tuple[Block, ...]) -> list[Run]:
    """Runs of blocks that lie side by side in one slab."""
    runs = []
    for neighbours in find_neighbours(blocks):
        found = blocks[neighbours]
        slots = slice(found[0].slot, found[-1].slot + 1)
        tensors = {name: t[slots] for name, t in found[0].slab.tensors.items()}
        runs.append(Run(found[0].store.layout, tensors, tuple(block.start for block in found)))
    return runs


def visible_tokens(layer: CacheLayer, row: Row) -> int:
    """Committed tokens that the row's next query (or first open one) may see."""
    length, retain = layer.row_length(row), layer.settings.retain
    if not retain.is_bounded and retain.reach is None:
        return length
    low = 0 if retain.reach is None else max(length - retain.reach + 1, 0)
    count = sum(block.num_tokens for block in (row.sinks, row.summary) if block is not None)
    count += sum(max(0, block.end - max(block.start, low, row.num_hidden)) for block in row.blocks)
    exact_low = max(low, row.sealed)
    return count + max(0, length - exact_low) + max(0, min(retain.sinks, exact_low, length) - row.sealed)


def dense_batch(layer: CacheLayer) -> tuple[Tensor, Tensor]:
    """Keys and values ``[batch, heads, tokens, dim]``; padding columns are zeros.

    Raises:
        QkvError: rows that do not line up under one mask.
    """
    rows = [_dense_row(layer, index) for index in range(layer.batch)]
    if layer.is_ragged:
        lengths = {keys.shape[1] for keys, _ in rows}
        if len(lengths) > 1 or any(row.start for row in layer.rows):
            raise QkvError(
                "rows that are padded and evict do not line up under the model's own mask; use "
                "KVCache.attach(model), whose attention masks by position"
            )
        return torch.stack([keys for keys, _ in rows]), torch.stack([values for _, values in rows])
    if len(rows) == 1 and layer.rows[0].start == 0:
        return rows[0][0][None], rows[0][1][None]
    return _frame(layer, [keys for keys, _ in rows]), _frame(layer, [values for _, values in rows])


def _frame(layer: CacheLayer, rows: list[Tensor]) -> Tensor:
    heads, _, dim = rows[0].shape
    out = rows[0].new_zeros(len(rows), heads, layer.seen, dim)
    for index, row in enumerate(rows):
        if row.shape[1]:
            out[index, :, -row.shape[1] :] = row
    return out


def _dense_row(layer: CacheLayer, index: int) -> tuple[Tensor, Tensor]:
    view, row = view_row(layer, index), layer.rows[index]
    low = 0 if view.reach is None else max(view.first_query - view.reach + 1, 0)
    keys, values = [], []
    if view.anchors is not None:
        turned = view.anchors[0]
        if view.anchor_turn is not None and view.rotation is not None:
            turned = view.rotation.move(turned, view.anchor_turn)
        keys.append(turned)
        values.append(view.anchors[1])
    for run in (run.on(view.tail_keys.device) for run in view.runs):
        run_keys, run_values = (t.transpose(0, 1).flatten(1, 2) for t in decode_slots(run.layout, run.tensors))
        shown = _shown(run, max(low, view.hidden))
        keys.append(run_keys if shown is None else run_keys[:, shown])
        values.append(run_values if shown is None else run_values[:, shown])
    count = view.tail_keys.shape[1]
    tail = [i for i in range(count) if row.sealed + i >= low or row.sealed + i < view.sinks]
    whole = len(tail) == count
    keys.append(view.tail_keys if whole else view.tail_keys[:, tail])
    values.append(view.tail_values if whole else view.tail_values[:, tail])
    return torch.cat(keys, 1), torch.cat(values, 1)


def _shown(run: Run, low: int) -> Tensor | None:
    """Which tokens of a run lie at ``low`` or after; None for all."""
    if min(run.starts) >= low:
        return None
    return (run_positions(run) >= low).nonzero().flatten()


def run_positions(run: Run) -> Tensor:
    """Position of every token of a run, ``long [tokens]``."""
    codes = run.tensors["keys.codes"]
    starts = torch.tensor(run.starts, device=codes.device)
    return (starts[:, None] + torch.arange(codes.shape[2], device=codes.device)).flatten()


def _anchors(row: Row) -> tuple[tuple[Tensor, Tensor] | None, list[int]]:
    parts = [block.store.decode(block) for block in (row.sinks, row.summary) if block is not None]
    if not parts:
        return None, []
    positions = [*range(row.num_hidden), *(row.summary_positions if row.summary is not None else ())]
    if len(parts) == 1:
        return parts[0], positions
    return (torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1)), positions


def _turn(positions: list[int], query: int, window: int, device: torch.device) -> Tensor:
    """Rotation that puts the anchors just before the window of a query."""
    count = len(positions)
    targets = torch.arange(count, device=device) + query - window + 1 - count
    return (targets - torch.tensor(positions, device=device)).clamp(min=0)
