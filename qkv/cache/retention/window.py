"""A window of recent tokens, the first few tokens, and a summary of what lies between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from qkv.cache.retention.base import Shape
from qkv.cache.retention.keep_all import UNBOUNDED, KeepAll
from qkv.cache.retention.merge import merge_block
from qkv.cache.rotation import Rotation
from qkv.cache.row import Row
from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer

OBSERVED_QUERIES = 16


@dataclass(frozen=True)
class Window(KeepAll):
    """Every query sees the newest ``size`` tokens, itself included, and the first ``sinks`` (StreamingLLM,
    arXiv 2309.17453). Sinks are kept exact, in storage of their own.

    Args:
        size: tokens of the window, exact to the token; blocks are freed when wholly outside.
        sinks: first tokens that stay visible. Without any, perplexity breaks down.
        summary: representatives that stand for all older tokens: neighbours are merged, values by
            attention weight, the key being that of the heaviest one. It rarely pays (about ±0.1 perplexity);
            with it, what is held is visible, so the lower edge of the window moves by whole blocks.
        rerotate: whether sinks and summary are turned so as to lie just before the window. None: only once
            the sequence is longer than the model's trained positions, where it is needed; within them the
            true positions are kept. True: always (StreamingLLM's own rule). False: never.

    Raises:
        QkvError: a size below 1 or a negative count.
    """

    size: int
    sinks: int = 4
    summary: int = 0
    rerotate: bool | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("size", self.size, 1),
            ("sinks", self.sinks, 0),
            ("summary", self.summary, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise QkvError(f"a window's {name} is a whole number of tokens, at least {least}; got {value!r}")

    @property
    def reach(self) -> int | None:
        return None if self.summary else self.size

    @property
    def num_observed(self) -> int:
        return OBSERVED_QUERIES if self.summary else 0

    @property
    def is_bounded(self) -> bool:
        return True

    @property
    def size_of_window(self) -> int:
        return self.size

    def check(self, layer: Shape) -> None:
        """Sinks can be turned only once they have left the tail."""
        if self.rerotate and self.size < layer.residual + layer.block_size:
            raise QkvError(
                f"Window(size={self.size}, rerotate=True) is shorter than residual + block_size = "
                f"{layer.residual + layer.block_size}, where sinks are not turned; lower these or raise it"
            )

    def turns(self, query: int, rotation: Rotation | None) -> bool:
        if rotation is None or self.rerotate is False:
            return False
        return bool(self.rerotate) or query >= rotation.trained_positions

    def settle(self, row: Row, layer: Shape) -> None:
        """Free, or merge into the summary, every block that has left the window."""
        length = layer.row_length(row)
        if length > self.size and row.pure is None:
            row.pure = self.size
        while row.blocks and self._has_left(row.blocks[0].end, length):
            if self.summary:
                merge_block(row, cast("CacheLayer", layer), self.summary)
            row.evict(0)

    def room(self, row: Row, layer: Shape) -> int:
        if not (self.summary and row.blocks):
            return UNBOUNDED
        return max(1, row.blocks[0].end + self.size - 1 - layer.row_length(row))

    def _has_left(self, end: int, length: int) -> bool:
        return end <= length - self.size + 1
