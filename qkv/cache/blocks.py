"""BlockStore: fixed-size blocks of keys and values, reference-counted, written once and never changed.

Blocks live in slabs of a few blocks, so that attention reads a run of neighbours as one view without a
copy. A slab has no holes: filling the last one or freeing a block makes it anew (a copy of at most
``SLAB_TOKENS`` tokens), so that the bytes held are exactly those of the live blocks. A ``Block`` is a
handle: where its bytes lie may change, what they say does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qkv.cache.codec import Codec, Layout

HOST = torch.device("cpu")
SLAB_TOKENS = 512
"""Tokens of a full slab: also the tile that attention works on, small enough to stay in a CPU's L2."""


@dataclass(frozen=True)
class BlockLayout:
    """What one block looks like: ``heads`` key/value heads, ``block_size`` tokens.

    Args:
        heads: key/value heads (never repeated for the query heads of a group).
        key_dim: width of a key; ``value_dim`` that of a value (they differ in latent attention).
        block_size: tokens of a block.
        keys: codec of the keys; ``values`` that of the values.
        dtype: the model's dtype: what exact blocks hold and dense reads return.
    """

    heads: int
    key_dim: int
    value_dim: int
    block_size: int
    keys: Codec
    values: Codec
    dtype: torch.dtype

    def tensors(self, tokens: int | None = None) -> Layout:
        """``{"keys.codes": (shape, dtype), ...}`` of one block."""
        tokens = self.block_size if tokens is None else tokens
        keys = self.keys.layout(self.heads, tokens, self.key_dim, self.dtype)
        values = self.values.layout(self.heads, tokens, self.value_dim, self.dtype)
        return {f"keys.{n}": v for n, v in keys.items()} | {f"values.{n}": v for n, v in values.items()}

    def nbytes(self, tokens: int | None = None) -> int:
        """Bytes of one block, metadata counted."""
        tokens = self.block_size if tokens is None else tokens
        return self.keys.stored_nbytes(self.heads, tokens, self.key_dim, self.dtype) + self.values.stored_nbytes(
            self.heads, tokens, self.value_dim, self.dtype
        )


@dataclass(eq=False, repr=False)
class Slab:
    """The storage of up to ``slab_blocks`` blocks: tensors ``[blocks, ...]``, and who lies where."""

    tensors: dict[str, Tensor]
    blocks: list[Block] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors.values())

    def place(self) -> None:
        for slot, block in enumerate(self.blocks):
            block.slab, block.slot = self, slot


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A handle on one sealed block.

    Args:
        store: who holds it.
        start: position of its first token in its row.
        num_tokens: tokens in it.
        references: tables that name it; freed at zero.
    """

    store: BlockStore
    start: int
    num_tokens: int
    slab: Slab
    slot: int = 0
    references: int = 1

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes it takes, metadata counted."""
        return self.store.layout.nbytes(self.num_tokens)

    def tensors(self) -> dict[str, Tensor]:
        """Views ``[1, ...]`` of its stored tensors."""
        return {name: t[self.slot : self.slot + 1] for name, t in self.slab.tensors.items()}


class BlockStore:
    """All blocks of one layout. Every mutation is one of ``put``, ``share`` and ``drop``.

    Args:
        layout: what a block looks like.
        offload: keep the blocks in host memory; whoever reads them fetches what it reads.
    """

    def __init__(self, layout: BlockLayout, *, offload: bool = False) -> None:
        self.layout, self.offloaded = layout, offload
        self.home: torch.device | None = None  # where blocks come from, and where they are decoded
        self.slab_blocks = max(1, SLAB_TOKENS // layout.block_size)
        self.moves = 0  # grows whenever blocks come, go, or come to lie elsewhere
        self._slabs: dict[Slab, None] = {}
        self._last: Slab | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks alive."""
        return sum(len(slab.blocks) for slab in self._slabs)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages really held: those of the live blocks, and nothing else."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def references(self) -> int:
        """References to all live blocks together; equals the entries of all tables (an invariant)."""
        return sum(block.references for slab in self._slabs for block in slab.blocks)

    def put(self, keys: Tensor, values: Tensor, starts: Sequence[int]) -> list[Block]:
        """Encode and hold blocks ``[blocks, heads, tokens, dim]``; each comes back with one reference."""
        layout = self.layout
        encoded = {f"keys.{n}": t for n, t in layout.keys.encode(keys).items()}
        encoded |= {f"values.{n}": t for n, t in layout.values.encode(values).items()}
        return self.put_encoded(encoded, starts)

    def put_encoded(self, encoded: dict[str, Tensor], starts: Sequence[int]) -> list[Block]:
        """Hold blocks that are encoded already (a saved cache)."""
        num_tokens = encoded["keys.codes"].shape[2]
        self.home = encoded["keys.codes"].device
        if self.offloaded:
            encoded = fetched(encoded, HOST)
        blocks: list[Block] = []
        for first in range(0, len(starts), self.slab_blocks):
            part = {name: t[first : first + self.slab_blocks] for name, t in encoded.items()}
            new = Slab({n: _owned(t, whole=len(starts) <= self.slab_blocks) for n, t in part.items()})
            new.blocks = [Block(self, s, num_tokens, new) for s in starts[first : first + self.slab_blocks]]
            blocks += new.blocks
            self._add(new)
        return blocks

    def share(self, block: Block) -> Block:
        """One more table names the block."""
        block.references += 1
        return block

    def drop(self, *blocks: Block) -> None:
        """One table less names these blocks; at zero a block's bytes are freed."""
        freed: dict[Slab, list[Block]] = {}
        for block in blocks:
            if block.references < 1:
                raise RuntimeError("a block was dropped more often than it was shared")
            block.references -= 1
            if block.references == 0:
                freed.setdefault(block.slab, []).append(block)
        self.moves += len(freed)
        for slab in freed:
            del self._slabs[slab]
            self._last = None if self._last is slab else self._last
        for slab, gone in freed.items():
            self._add_rest(slab, gone)

    def decode(self, block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values ``dtype [heads, tokens, dim]`` of one block."""
        keys, values = decode_slots(self.layout, fetched(block.tensors(), self.home))
        return keys[0], values[0]

    def offload(self, offloaded: bool) -> None:
        """Move every block, and those to come, to host memory or back; handles stay as they are."""
        self.offloaded = offloaded
        self.moves += 1
        for slab in self._slabs:
            slab.tensors = fetched(slab.tensors, HOST if offloaded else self.home)

    def _add(self, new: Slab) -> None:
        last = self._last
        if last is not None and self._fits(last, new):
            joined = Slab({n: torch.cat((t, new.tensors[n])) for n, t in last.tensors.items()})
            joined.blocks = last.blocks + new.blocks
            del self._slabs[last]
            new = joined
        new.place()
        self.moves += 1
        self._slabs[new] = None
        self._last = new

    def _fits(self, last: Slab, new: Slab) -> bool:
        if len(last.blocks) + len(new.blocks) > self.slab_blocks:
            return False
        return last.tensors["keys.codes"].shape[1:] == new.tensors["keys.codes"].shape[1:]

    def _add_rest(self, slab: Slab, gone: list[Block]) -> None:
        """What is left of a slab, without holes."""
        rest = [block for block in slab.blocks if block not in gone]
        if rest:
            slots = [block.slot for block in rest]
            self._add(Slab({n: t[slots] for n, t in slab.tensors.items()}, rest))
        slab.tensors, slab.blocks = {}, []  # a freed block still points here: its bytes must not wait for gc


def fetched(tensors: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
    """The tensors on ``device``; no copy where they are there already."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def decode_slots(layout: BlockLayout, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values ``dtype [blocks, heads, tokens, dim]`` of stored tensors ``[blocks, ...]``."""
    keys = {n[5:]: t for n, t in tensors.items() if n.startswith("keys.")}
    values = {n[7:]: t for n, t in tensors.items() if n.startswith("values.")}
    return (
        layout.keys.decode(keys, layout.key_dim, layout.dtype),
        layout.values.decode(values, layout.value_dim, layout.dtype),
    )


def _owned(tensor: Tensor, whole: bool) -> Tensor:
    """The tensor in a storage of its own size, so that no larger one is kept alive behind it."""
    tensor = tensor.contiguous()
    if whole and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()
