"""Where a cache's bytes are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.cache.layer import CacheLayer


@dataclass(frozen=True)
class CacheRow:
    """Layers that are kept alike, together.

    Args:
        name: codecs of keys and values, and the policy; the class for a stock layer.
        layers: how many there are.
        tokens_seen, tokens_held: of the fullest row.
        block_nbytes, exact_nbytes, statistics_nbytes: sealed blocks; tail, sinks and summaries; the rest.
        bits: bits an element of the sealed blocks, scales counted; 0 where there are none.
    """

    name: str
    layers: int
    tokens_seen: int
    tokens_held: int
    block_nbytes: int
    exact_nbytes: int
    statistics_nbytes: int
    bits: float

    @property
    def nbytes(self) -> int:
        return self.block_nbytes + self.exact_nbytes + self.statistics_nbytes


@dataclass(frozen=True)
class CacheReport:
    """Rows, and their sum, which is the cache's ``nbytes``."""

    rows: tuple[CacheRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"nbytes": self.nbytes, "rows": [asdict(row) | {"nbytes": row.nbytes} for row in self.rows]}

    def __str__(self) -> str:
        names = f"{'layers':42} {'n':>3} {'seen':>7} {'held':>7}"
        head = f"{names} {'blocks MB':>10} {'exact MB':>9} {'bits':>6} {'MB':>9}"
        lines = [
            f"{row.name:42} {row.layers:3} {row.tokens_seen:7} {row.tokens_held:7} "
            f"{row.block_nbytes / 1e6:10.3f} {row.exact_nbytes / 1e6:9.3f} {row.bits:6.2f} "
            f"{row.nbytes / 1e6:9.3f}"
            for row in self.rows
        ]
        return "\n".join([head, *lines, f"{'total':42} {'':46} {self.nbytes / 1e6:9.3f}"])


def report_layers(layers: Sequence[CacheLayer], stock: Sequence[tuple[str, int]]) -> CacheReport:
    """Sum up block layers, and stock ones given as (name, bytes)."""
    groups: dict[str, list[CacheLayer]] = {}
    for layer in layers:
        settings = layer.settings
        groups.setdefault(f"{settings.keys} / {settings.values}, {type(settings.retain).__name__}", []).append(layer)
    rows = [_row(name, group) for name, group in groups.items()]
    for name in dict.fromkeys(name for name, _ in stock):
        sizes = [nbytes for other, nbytes in stock if other == name]
        rows.append(CacheRow(name, len(sizes), 0, 0, 0, sum(sizes), 0, 0.0))
    return CacheReport(tuple(rows))


def _row(name: str, layers: list[CacheLayer]) -> CacheRow:
    blocks = exact = statistics = elements = 0
    for layer in layers:
        sealed = {id(b): b for row in layer.rows for b in row.blocks}.values()
        apart = {id(b): b for row in layer.rows for b in row}.values()
        size = sum(block.nbytes for block in sealed)
        blocks += size
        kept = sum(b.nbytes for b in apart) - size + (layer.tail.nbytes if layer.tail is not None else 0)
        exact += kept
        statistics += layer.nbytes - size - kept
        elements += sum(_elements(block.store.layout, block.num_tokens) for block in sealed)
    bits = 8 * blocks / elements if elements else 0.0
    seen, held = max(len(layer) for layer in layers), max(layer.num_held for layer in layers)
    return CacheRow(name, len(layers), seen, held, blocks, exact, statistics, bits)


def _elements(layout: Any, tokens: int) -> int:
    return int(layout.heads * tokens * (layout.key_dim + layout.value_dim))
