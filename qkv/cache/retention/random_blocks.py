"""The baseline that any score must beat: evict blocks at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.cache.retention.importance import Importance
from qkv.cache.row import Row


@dataclass(frozen=True)
class RandomBlocks(Importance):
    """:class:`Importance` with random scores, a fixed function of the seed and the blocks' positions."""

    seed: int = 0

    @property
    def needs_mass(self) -> bool:
        return False

    def scores(self, row: Row) -> Tensor:
        draws = [torch.Generator().manual_seed(self.seed * 1_000_003 + block.start) for block in row.blocks]
        return torch.stack([torch.rand((), generator=generator) for generator in draws])
