"""The baseline that any score must beat: evict blocks at random."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from qkv.cache.blocks import Block
from qkv.cache.retention.importance import Importance
from qkv.cache.row import Row


@dataclass(frozen=True)
class RandomBlocks(Importance):
    """:class:`Importance` with random scores: a fixed function of the seed, the position, and the block's
    first key, so that every layer and row draws for itself."""

    seed: int = 0

    @property
    def needs_mass(self) -> bool:
        return False

    def scores(self, row: Row) -> Tensor:
        return torch.stack([self._draw(block) for block in row.blocks])

    def _draw(self, block: Block) -> Tensor:
        first_key = block.tensors()["keys.codes"][0, 0, 0].cpu().contiguous().view(torch.uint8)
        seed = crc32(bytes(first_key.tolist()), crc32(f"{self.seed} {block.start}".encode()))
        return torch.rand((), generator=torch.Generator().manual_seed(seed))
