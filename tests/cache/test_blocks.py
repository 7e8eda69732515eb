"""The block store: references conserved, bytes exact, contents never changed."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import Tensor

from qkv.cache.blocks import Block, BlockLayout, BlockStore
from qkv.cache.codec import Codec


def make_store(name: str = "exact", block_size: int = 64) -> BlockStore:
    codec = Codec.parse(name, "channel")
    return BlockStore(BlockLayout(2, 8, 16, block_size, codec, codec, torch.float32))


def random_blocks(count: int, size: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 2, size, 8), torch.randn(count, 2, size, 16)


@pytest.mark.parametrize("name", ["exact", "int8", "int4", "int2", "nf4"])
def test_bytes_are_those_of_the_live_blocks(name: str) -> None:
    store = make_store(name)
    blocks = store.put(*random_blocks(19), starts=range(0, 19 * 64, 64))
    assert store.nbytes == 19 * store.layout.nbytes() == sum(b.nbytes for b in blocks)
    for i, block in enumerate(random.Random(0).sample(blocks, 19)):
        store.drop(block)
        assert store.nbytes == (18 - i) * store.layout.nbytes()
        assert store.num_blocks == store.references == 18 - i


def test_contents_stay_while_neighbours_come_and_go() -> None:
    rng, store, live = random.Random(1), make_store(), dict[Block, tuple[Tensor, Tensor]]()
    for _ in range(200):
        if rng.random() < 0.55 or not live:
            keys, values = random_blocks(rng.randint(1, 11))
            for i, block in enumerate(store.put(keys, values, starts=range(0, len(keys) * 64, 64))):
                live[block] = (keys[i], values[i])
        else:
            gone = rng.sample(list(live), min(len(live), rng.randint(1, 6)))
            store.drop(*gone)
            for block in gone:
                del live[block]
        for block, (keys, values) in live.items():
            found = store.decode(block)
            assert torch.equal(found[0], keys) and torch.equal(found[1], values)
        assert store.nbytes == len(live) * store.layout.nbytes()


def test_shared_blocks_live_until_the_last_reference() -> None:
    store = make_store()
    (block,) = store.put(*random_blocks(1), starts=[0])
    store.share(block)
    store.drop(block)
    assert store.num_blocks == 1
    store.drop(block)
    assert store.num_blocks == store.nbytes == 0
    with pytest.raises(RuntimeError, match="more often than it was shared"):
        store.drop(block)


def test_freed_bytes_do_not_wait_for_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        store = make_store()
        blocks = store.put(*random_blocks(8), starts=range(0, 512, 64))
        storage = weakref.ref(blocks[0].slab.tensors["keys.codes"].untyped_storage())
        store.drop(blocks[3])
        assert storage() is None
        storage = weakref.ref(blocks[0].slab.tensors["keys.codes"].untyped_storage())
        store.drop(*blocks[:3], *blocks[4:])
        assert storage() is None and store.nbytes == 0
    finally:
        gc.enable()


def test_a_block_keeps_no_larger_storage_alive() -> None:
    store = make_store()
    wide = torch.randn(1, 2, 4096, 8)
    store.put(wide[:, :, :64], torch.randn(1, 2, 4096, 16)[:, :, 64:128], starts=[0])
    assert store.nbytes == store.layout.nbytes()
