"""Attention over blocks in torch: folded scales, a run of blocks at a time, on any device.

Only the cast of the codes to float touches every element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from qkv.cache.attention_case import Asked, Attended, turned_anchors, turned_queries
from qkv.cache.fold import fold_keys, fold_values
from qkv.cache.hadamard import spread
from qkv.cache.view import RowView, Run, run_positions

SERVES = "every case, on every device: a run of blocks cast to float32 at a time"
QUERY_TILE: Final = 128
"""Queries worked on at once, so that the scores of a tile stay small in a long prefill."""


@dataclass
class Scope:
    """The parts of a call that do not change from tile to tile."""

    view: RowView
    scale: float
    softcap: float | None
    positions: Tensor
    last: int
    block_size: int
    with_mass: bool


def unavailable() -> str | None:
    """Why it is not live: it always is."""
    return None


def refuses(asked: Asked) -> str | None:
    """Why it cannot take a case: it takes every one."""
    return None


def attend(asked: Asked, *, walk: Walk | None = None) -> Attended:
    """See :func:`qkv.cache.attention.attend`; ``walk`` does what :func:`walk_runs` does."""
    queries, view, positions, open_mask = asked.queries, asked.view, asked.positions, asked.open_mask
    tokens, begin = asked.tokens, asked.first_position
    last = begin + tokens - 1 if positions is None else int(positions.max())
    if positions is None:
        positions = torch.arange(begin, begin + tokens, device=queries.device)
    if open_mask is None:
        open_mask = torch.ones(tokens, view.num_open, dtype=torch.bool, device=queries.device)
        open_mask = open_mask.tril(view.num_open - tokens)
    parts = []
    for first in range(0, tokens, QUERY_TILE):
        tile = slice(first, first + QUERY_TILE)
        scope = Scope(view, asked.scale, asked.softcap, positions[tile], last, asked.block_size, asked.with_mass)
        parts.append(_attend_tile(queries[:, tile], open_mask[tile], asked.sink_logits, scope, walk or walk_runs))
    return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: list[Attended]) -> Attended:
    output = torch.cat([part.output for part in parts], 1)
    masses = [part.mass for part in parts if part.mass is not None]
    focuses = [part.focus for part in parts if part.focus is not None]
    if not masses:
        return Attended(output)
    return Attended(output, torch.cat(masses), torch.cat(focuses))


@dataclass
class Softmax:
    """Online softmax of rows ``[heads, rows]``: running maximum, denominator and weighted values."""

    peak: Tensor
    total: Tensor
    output: Tensor
    mass: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    peaks: list[Tensor] = field(default_factory=list)

    def weigh(self, scores: Tensor) -> Tensor:
        """Probabilities of a tile ``[heads, rows, tokens]`` against the running maximum (in place)."""
        peak = torch.maximum(self.peak, scores.amax(-1))
        shrink = torch.exp(self.peak - peak)
        self.peak = peak
        probabilities = scores.sub_(peak[..., None]).exp_()
        self.total = self.total * shrink + probabilities.sum(-1)
        self.output.mul_(shrink[..., None])
        return probabilities

    def absorb(self, peak: Tensor, total: Tensor, output: Tensor) -> None:
        """Take in another softmax over other tokens: its maximum, denominator and weighted values."""
        highest = torch.maximum(self.peak, peak)
        mine, others = torch.exp(self.peak - highest), torch.exp(peak - highest)
        self.peak, self.total = highest, self.total * mine + total * others
        self.output.mul_(mine[..., None]).add_(output * others[..., None])

    def note(self, probabilities: Tensor, blocks: int) -> None:
        """Remember the mass of each block of a tile, ``[heads, rows, blocks * tokens]``."""
        by_block = torch.unflatten(probabilities, -1, (blocks, -1))
        self.mass.append(by_block.sum(-1))
        self.norms.append(torch.linalg.vector_norm(by_block, dim=-1))
        self.peaks.append(self.peak)

    def observed(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Mass and focus ``[tokens, blocks]`` of what was noted, at the final maximum and denominator."""
        mass = torch.cat(self.mass, -1)
        focus = torch.cat(self.norms, -1).square_() / mass.clamp(min=1e-30)
        shrink = torch.exp(torch.stack(self.peaks, -1) - self.peak[..., None]) / self.total[..., None]
        blocks = torch.tensor([part.shape[-1] for part in self.mass], device=mass.device)
        shrink = shrink.repeat_interleave(blocks, -1, output_size=mass.shape[-1])
        return _over_heads(mass * shrink, tokens), _over_heads(focus * shrink, tokens)


def _over_heads(by_row: Tensor, tokens: int) -> Tensor:
    """``[heads, group * tokens, blocks]`` to ``float32 [tokens, blocks]``."""
    return torch.unflatten(by_row, 1, (-1, tokens)).sum((0, 1)).to(torch.float32)


Walk = Callable[[Tensor, Softmax, Scope], None]
"""Takes the part of every block into the softmax of rows ``[heads, group * tokens, key_dim]``, scaled."""


def walk_runs(rows: Tensor, state: Softmax, scope: Scope) -> None:
    """Run by run in torch."""
    for run in scope.view.runs:
        _run_tile(rows, run.on(rows.device), state, scope)


def _attend_tile(queries: Tensor, open_mask: Tensor, sink_logits: Tensor | None, scope: Scope, walk: Walk) -> Attended:
    view = scope.view
    heads, value_dim = view.tail_keys.shape[0], view.tail_values.shape[2]
    tokens = queries.shape[1]
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    rows = torch.unflatten(queries.to(wide), 0, (heads, -1)).flatten(1, 2) * scope.scale
    state = _begin(rows, value_dim, sink_logits, tokens)
    if view.anchors is not None:
        _anchor_tile(rows, state, scope)
    walk(rows, state, scope)
    _tail_tile(rows, open_mask, state, scope)
    if _is_rotated(view):
        state.output = spread(state.output)
    output = torch.unflatten(state.output / state.total[..., None], 1, (-1, tokens)).flatten(0, 1)
    output = output.to(queries.dtype)
    if not scope.with_mass:
        return Attended(output)
    return Attended(output, *state.observed(tokens))


def _begin(rows: Tensor, value_dim: int, sink_logits: Tensor | None, tokens: int) -> Softmax:
    heads, count, _ = rows.shape
    output = rows.new_zeros(heads, count, value_dim)
    if sink_logits is None:
        return Softmax(rows.new_full((heads, count), -1e30), rows.new_zeros(heads, count), output)
    by_head = torch.unflatten(sink_logits.to(rows.dtype), 0, (heads, -1))
    logits = by_head[..., None].expand(-1, -1, tokens).flatten(1)
    return Softmax(logits, torch.ones_like(logits), output)


def _run_tile(rows: Tensor, run: Run, state: Softmax, scope: Scope) -> None:
    blocks = len(run.starts)
    scores = fold_keys(rows, run)
    mask = _run_mask(run, scope)
    probabilities = state.weigh(_finish(scores, mask, scope))
    if scope.with_mass:
        state.note(probabilities, blocks)
    fold_values(probabilities, run, state.output)


def _run_mask(run: Run, scope: Scope) -> Tensor | None:
    """``bool [tokens, run]`` of what the queries see of a run; None where they see all of it."""
    view, low = scope.view, min(run.starts)
    reach = view.reach
    if low >= view.hidden and (reach is None or low > scope.last - reach):
        return None
    keys = run_positions(run)
    seen = (keys >= view.hidden)[None]
    if reach is not None:
        seen = seen & (keys[None] > scope.positions[:, None] - reach)
    return seen.expand(scope.positions.shape[0], -1)


def _anchor_tile(rows: Tensor, state: Softmax, scope: Scope) -> None:
    view, tokens = scope.view, scope.positions.shape[0]
    keys, values = turned_anchors(view, rows.dtype)
    if view.anchor_turn is not None:
        rows = turned_queries(torch.unflatten(rows, 1, (-1, tokens)), view, scope.positions).flatten(1, 2)
    scores = _finish(torch.bmm(rows, keys.transpose(1, 2)), None, scope)
    _add_exact(state, state.weigh(scores), values, view)


def _tail_tile(rows: Tensor, open_mask: Tensor, state: Softmax, scope: Scope) -> None:
    view = scope.view
    keys, values = view.tail_keys.to(rows.dtype), view.tail_values.to(rows.dtype)
    probabilities = state.weigh(_finish(torch.bmm(rows, keys.transpose(1, 2)), _tail_mask(open_mask, scope), scope))
    _add_exact(state, probabilities, values, view)
    if scope.with_mass:
        count = keys.shape[1]
        blocks = -(-count // scope.block_size)
        padded = torch.nn.functional.pad(probabilities, (0, blocks * scope.block_size - count))
        state.note(padded, blocks)


def _add_exact(state: Softmax, probabilities: Tensor, values: Tensor, view: RowView) -> None:
    product = torch.bmm(probabilities, values)
    state.output.add_(spread(product) if _is_rotated(view) else product)


def _is_rotated(view: RowView) -> bool:
    """Whether the output is gathered in rotated channels, as the blocks' values are."""
    return bool(view.runs) and view.runs[0].layout.values.is_rotated


def _tail_mask(open_mask: Tensor, scope: Scope) -> Tensor | None:
    """``bool [tokens, tail]``: committed tokens all, open ones as the mask says, both within reach."""
    view, count = scope.view, scope.view.tail_keys.shape[1]
    if view.num_open == 1 and view.reach is None:
        return None
    closed = count - view.num_open
    seen = torch.nn.functional.pad(open_mask, (closed, 0), value=True)
    if view.reach is None:
        return seen
    keys = torch.arange(count, device=seen.device) + view.tail_start
    near = keys[None] > scope.positions[:, None] - view.reach
    return seen & (near | (keys < view.sinks)[None])


def _finish(scores: Tensor, mask: Tensor | None, scope: Scope) -> Tensor:
    """Soft-cap and mask scores ``[heads, group * tokens, keys]``."""
    if scope.softcap is not None:
        scores = torch.tanh(scores / scope.softcap) * scope.softcap
    if mask is not None:
        tokens = scope.positions.shape[0]
        scores = torch.unflatten(scores, 1, (-1, tokens)).masked_fill(~mask, -torch.inf).flatten(1, 2)
    return scores
