"""Where the blocks of a row lie: neighbours in a slab as one run, and their addresses, remembered until one moves."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from qkv.cache.blocks import Block

_TENSORS: Final = ("keys.codes", "values.codes", "keys.scale", "values.scale", "keys.zero", "values.zero")


def find_neighbours(blocks: Sequence[Block]) -> Iterator[slice]:
    """Cut a table into runs of blocks that lie side by side in one slab."""
    first = 0
    for i in range(1, len(blocks) + 1):
        if i < len(blocks) and blocks[i].slab is blocks[i - 1].slab and blocks[i].slot == blocks[i - 1].slot + 1:
            continue
        if i > first:
            yield slice(first, i)
        first = i


class BlockTable:
    """The addresses that native code reads a row's blocks at. It keeps no storage alive: only numbers."""

    def __init__(self) -> None:
        self._blocks: tuple[Block, ...] = ()
        self._moves = -1
        self._runs, self._starts = array("q"), array("q")

    def find(self, blocks: tuple[Block, ...]) -> tuple[array[int], array[int]]:
        """For each run the addresses of codes, scales and zero points (keys before values; 0: none), its blocks and
        their tokens; and the position of each block's first token."""
        moves = blocks[0].store.moves if blocks else -1
        if moves != self._moves or blocks != self._blocks:
            self._blocks, self._moves = blocks, moves
            self._runs = array("q", [number for run in find_neighbours(blocks) for number in _run(blocks[run])])
            self._starts = array("q", [block.start for block in blocks])
        return self._runs, self._starts


def _run(blocks: tuple[Block, ...]) -> list[int]:
    tensors, slot = blocks[0].slab.tensors, blocks[0].slot
    found = [tensors.get(name) for name in _TENSORS]
    addresses = [0 if t is None else t.data_ptr() + slot * t.stride(0) * t.element_size() for t in found]
    return [*addresses, len(blocks), blocks[0].num_tokens]
