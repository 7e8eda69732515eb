"""One sequence of a batch: its table of sealed blocks, and where its open tail begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from qkv.cache.blocks import Block, BlockStore
from qkv.cache.table import BlockTable


@dataclass(eq=False)
class Row:
    """A table of blocks in the order of their positions.

    Args:
        start: frame column of the row's first real token; the columns before it are padding.
        sealed: positions below this have left the tail: they are in ``blocks``, merged, or evicted.
        blocks: sealed blocks still held.
        sinks: the first tokens, kept exact for ever (their copies in ``blocks`` are hidden).
        summary: representatives of what has left, exact; ``summary_weights`` their attention, float32.
        dropped: end of the newest block that was evicted or merged; 0 if none was.
        pure: tokens from here on were computed while something was hidden from them; None if none were.
        mass: decayed attention mass, float32, of each block and of each block to be in the tail; ``focus``
            the same weighted with its concentration. None until a query was observed.
        table: where ``blocks`` lie.
    """

    start: int = 0
    sealed: int = 0
    blocks: list[Block] = field(default_factory=list)
    sinks: Block | None = None
    summary: Block | None = None
    summary_positions: tuple[int, ...] = ()
    summary_weights: Tensor | None = None
    dropped: int = 0
    pure: int | None = None
    mass: Tensor | None = None
    focus: Tensor | None = None
    table: BlockTable = field(default_factory=BlockTable)

    def __iter__(self) -> Iterator[Block]:
        """Every block the row holds a reference to."""
        yield from (block for block in (self.sinks, self.summary) if block is not None)
        yield from self.blocks

    @property
    def num_hidden(self) -> int:
        """Positions below this are read from ``sinks``, not from ``blocks``."""
        return self.sinks.num_tokens if self.sinks is not None else 0

    def fork(self) -> Row:
        """A second row over the same blocks: ids and reference counts, no bytes."""
        for block in self:
            block.store.share(block)
        return replace(self, blocks=list(self.blocks), table=BlockTable())

    def release(self) -> None:
        """Give every block back."""
        held: dict[BlockStore, list[Block]] = {}
        for block in self:
            held.setdefault(block.store, []).append(block)
        self.blocks, self.sinks, self.summary = [], None, None
        for store, blocks in held.items():
            store.drop(*blocks)

    def evict(self, index: int) -> None:
        """Let one block go, with its statistics."""
        block = self.blocks.pop(index)
        self.dropped = max(self.dropped, block.end)
        self.mass, self.focus = _without(self.mass, index), _without(self.focus, index)
        block.store.drop(block)

    def trim_statistics(self, tail_blocks: int) -> None:
        """Forget what was noted of blocks that did not come to be."""
        count = len(self.blocks) + tail_blocks
        if self.mass is not None and self.mass.shape[0] > count:
            self.mass = self.mass[:count].clone()
        if self.focus is not None and self.focus.shape[0] > count:
            self.focus = self.focus[:count].clone()

    def held_tokens(self, length: int) -> int:
        """Distinct tokens held when the row is ``length`` tokens long."""
        hidden = sum(max(0, min(block.end, self.num_hidden) - block.start) for block in self.blocks)
        return sum(block.num_tokens for block in self) - hidden + length - self.sealed


def _without(statistic: Tensor | None, index: int) -> Tensor | None:
    if statistic is None or index >= statistic.shape[0]:
        return statistic
    kept = [i for i in range(statistic.shape[0]) if i != index]
    return statistic[kept]
