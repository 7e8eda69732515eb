"""Evict whole blocks by a score of named, normalised terms, under a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from qkv.cache.retention.base import Shape
from qkv.cache.retention.keep_all import UNBOUNDED, KeepAll
from qkv.cache.retention.sizes import parse_budget
from qkv.cache.row import Row
from qkv.errors import QkvError


@dataclass(frozen=True)
class Importance(KeepAll):
    """Keep the blocks that attention uses, within a budget.

    The score of a block is ``frequency · rank(decayed attention mass) + recency · rank(position) +
    concentration · rank(how few tokens of the block get the mass)``, each rank running from 0 to 1 over the
    row's blocks of the layer; ``layer`` is a layer's weight, given as a share of the budget. The published
    formula (0.3 log frequency + 0.2 log recency + 0.3 key-norm concentration + 0.2 layer) is worse than
    random as written, since every read touches every block; its weights are the defaults over these terms.
    Attention mass is seen only through our attention (``KVCache.attach``); unattached, its ranks are equal.

    Args:
        budget: tokens a row and layer may hold (int), a fraction of the tokens seen (float below 1), or
            bytes of the whole cache, whatever the batch (``"512MB"``).
        frequency, recency, concentration: weights of the terms.
        layer: slope of the pyramid: the first layer gets ``1 + layer`` of the mean, the last ``1 - layer``.
        layers: ``"uniform"``, ``"pyramid"``, or a share for each layer. Unequal layers need ``attach``.
        sinks: first tokens, kept exact and for ever.
        recent: newest tokens that are never evicted: a fraction of the budget (float) or tokens (int).
        half_life: tokens after which an observed attention counts half. Long, because what is needed again is
            often not looked at in between: at 384, a passage that returns after 448 tokens was kept no better
            than by chance; much longer, and blocks of the beginning stay for having been seen for long.

    Raises:
        QkvError: a budget that cannot be read, or too small for a tail, the sinks and one block.
    """

    budget: int | float | str
    frequency: float = 0.3
    recency: float = 0.2
    concentration: float = 0.3
    layer: float = 0.2
    layers: Literal["uniform", "pyramid"] | Sequence[float] = "uniform"
    sinks: int = 4
    recent: int | float = 0.5
    half_life: float = 1536.0

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        if isinstance(self.layers, str) and self.layers not in ("uniform", "pyramid"):
            raise QkvError(f"layers {self.layers!r}: choose uniform, pyramid or a list of shares")
        if not 0 <= self.layer < 1:
            raise QkvError(f"layer {self.layer!r} is not a slope from 0 up to 1")
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise QkvError(f"sinks {self.sinks!r} is not a whole number of tokens")

    @property
    def needs_mass(self) -> bool:
        return self.frequency > 0 or self.concentration > 0

    @property
    def is_bounded(self) -> bool:
        return True

    def shares(self, num_layers: int) -> list[float]:
        """Share of the budget of each layer; they sum to 1."""
        if not isinstance(self.layers, str):
            if len(self.layers) != num_layers or min(self.layers) <= 0:
                raise QkvError(f"layers lists {len(self.layers)} shares for {num_layers} cached layers; all above 0")
            return [share / sum(self.layers) for share in self.layers]
        slope = self.layer if self.layers == "pyramid" and num_layers > 1 else 0.0
        return [(1 + slope - 2 * slope * i / max(num_layers - 1, 1)) / num_layers for i in range(num_layers)]

    def check(self, layer: Shape) -> None:
        """The smallest budget holds the sinks, the longest tail and a block."""
        least = self._least_tokens(layer)
        kind, amount = parse_budget(self.budget)
        if kind == "tokens" and amount * layer.token_share < least:
            raise QkvError(
                f"a budget of {amount * layer.token_share:.0f} tokens a layer is below the {least} that "
                "sinks, tail and one block take; raise it, or lower residual or block_size"
            )
        if kind == "bytes" and self._max_blocks(layer) < 1:
            share, needed = layer.byte_share or 0, self._reserve(layer) + layer.block_nbytes
            raise QkvError(
                f"a budget of {share:,} bytes a row and layer is below the {needed:,} that sinks, tail "
                "and one block take; raise it, or lower residual or block_size"
            )

    def settle(self, row: Row, layer: Shape) -> None:
        """Evict the least important blocks until the row is within its budget."""
        while row.blocks and self._excess(row, layer) > 0:
            if row.pure is None:
                row.pure = layer.row_length(row)
            row.evict(self._victim(row, layer))

    def room(self, row: Row, layer: Shape) -> int:
        if parse_budget(self.budget)[0] == "bytes":
            return UNBOUNDED
        most = layer.residual + layer.block_size
        return next((n for n in range(1, most) if self._excess(row, layer, n) > 0), UNBOUNDED)

    def scores(self, row: Row) -> Tensor:
        """Score of each block of the row, ``float32 [blocks]``; higher is kept."""
        count = len(row.blocks)
        recency = torch.arange(count, dtype=torch.float32) / max(count - 1, 1)
        score = self.recency * recency
        if row.mass is not None and row.focus is not None:
            mass, focus = _sized(row.mass, count), _sized(row.focus, count)
            focus = focus / mass.clamp(min=1e-30)
            score = score + self.frequency * _ranks(mass) + self.concentration * _ranks(focus)
        return score

    def _excess(self, row: Row, layer: Shape, more: int = 0) -> int:
        """Tokens (blocks, for bytes) above the budget, once ``more`` tokens have come."""
        kind, amount = parse_budget(self.budget)
        length = layer.row_length(row) + more
        if kind == "bytes":
            return len(row.blocks) - self._max_blocks(layer)
        limit = amount if kind == "tokens" else max(ceil(amount * length), self._least_tokens(layer))
        return row.held_tokens(length) - int(limit * layer.token_share)

    def _victim(self, row: Row, layer: Shape) -> int:
        length = layer.row_length(row)
        protected = length - self._recent_tokens(row, layer)
        candidates = [i for i, block in enumerate(row.blocks) if block.end <= protected] or [0]
        scores = self.scores(row)
        return min(candidates, key=lambda i: float(scores[i]))

    def _recent_tokens(self, row: Row, layer: Shape) -> int:
        if not isinstance(self.recent, float):
            return self.recent
        kind, amount = parse_budget(self.budget)
        if kind == "bytes":
            return int(self.recent * self._max_blocks(layer) * layer.block_size)
        limit = amount if kind == "tokens" else amount * layer.row_length(row)
        return int(self.recent * limit * layer.token_share)

    def _least_tokens(self, layer: Shape) -> int:
        return self.sinks + layer.residual + 2 * layer.block_size - 1

    def _reserve(self, layer: Shape) -> int:
        statistics = 8 * (2 + ceil(layer.residual / layer.block_size)) if self.needs_mass else 0
        return (self.sinks + layer.residual + layer.block_size - 1) * layer.token_nbytes + statistics

    def _max_blocks(self, layer: Shape) -> int:
        statistics = 8 if self.needs_mass else 0
        return ((layer.byte_share or 0) - self._reserve(layer)) // (layer.block_nbytes + statistics)


def _sized(statistic: Tensor, count: int) -> Tensor:
    """The first ``count`` entries on the CPU; blocks that nothing has observed yet count 0."""
    known = statistic[:count].float().cpu()
    return torch.nn.functional.pad(known, (0, count - known.shape[0]))


def _ranks(values: Tensor) -> Tensor:
    """0 for the smallest to 1 for the largest; equal values share the middle of their ranks."""
    ordered = values.sort().values
    below = torch.searchsorted(ordered, values)
    upto = torch.searchsorted(ordered, values, right=True)
    return (below + upto - 1) / (2 * max(len(values) - 1, 1))
