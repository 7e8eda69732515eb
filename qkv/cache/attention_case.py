"""What is asked of attention over blocks, and what comes back: what every back end of it takes and returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.cache.view import RowView


@dataclass(frozen=True)
class Asked:
    """One row's open queries and what they may read; :func:`qkv.cache.attention.attend` says what each means."""

    queries: Tensor
    view: RowView
    scale: float
    block_size: int
    softcap: float | None = None
    sink_logits: Tensor | None = None
    positions: Tensor | None = None
    open_mask: Tensor | None = None
    with_mass: bool = False

    @property
    def tokens(self) -> int:
        """Queries a head."""
        return self.queries.shape[1]

    @property
    def first_position(self) -> int:
        """Position of the first query, where they are consecutive."""
        return self.view.first_query + self.view.num_open - self.tokens


@dataclass
class Attended:
    """Result for one row.

    Args:
        output: ``[query_heads, tokens, value_dim]``, of the queries' dtype.
        mass: ``float32 [tokens, blocks]``: probability each query spends on each block, summed over heads;
            sealed blocks in the table's order, then those that the tail will become. None if not asked for.
        focus: likewise, mass times its concentration in the block, ``sum p² / sum p`` (Herfindahl).
    """

    output: Tensor
    mass: Tensor | None = None
    focus: Tensor | None = None


def turned_queries(queries: Tensor, view: RowView, positions: Tensor) -> Tensor:
    """Queries ``[heads, tokens, key_dim]`` at ``positions`` as the anchors, turned for the first one, need them."""
    assert view.rotation is not None
    lead = positions - view.first_query + view.anchor_lead
    later = max(view.anchor_lead, 0) - lead.clamp(min=0)
    return view.rotation.move(queries, later)


def turned_anchors(view: RowView, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The anchors' keys and values in ``dtype``, the keys turned for the first open query where they must be."""
    assert view.anchors is not None
    keys, values = (t.to(dtype) for t in view.anchors)
    if view.anchor_turn is not None and view.rotation is not None:
        keys = view.rotation.move(keys, view.anchor_turn)
    return keys, values
