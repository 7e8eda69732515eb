"""The exact codec is transformers' DynamicCache to the bit, whatever is done to both in whatever order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from qkv.cache.layer import CacheLayer
from qkv.integration.hf_cache import KVCache
from tests.integration.test_hf_cache import BASE

CONFIG = LlamaConfig(**BASE)
LAYERS, HEADS, WIDTH = 2, 2, 8
MOVES = ("append", "append", "append", "crop", "reorder", "repeat", "select", "copy", "reset")


def step(caches: list[Any], tokens: int, batch: int, generator: torch.Generator) -> None:
    """The same new keys and values to both; what comes back must be the same bits."""
    for layer in range(LAYERS):
        new = torch.randn(2, batch, HEADS, tokens, WIDTH, generator=generator)
        ours, theirs = (cache.update(new[0].clone(), new[1].clone(), layer) for cache in caches)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len({cache.get_seq_length() for cache in caches}) == 1


def move(name: str, caches: list[Any], batch: int, generator: torch.Generator) -> int:
    """Do one move to both; returns the new number of rows."""

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def rows(count: int) -> Tensor:
        return torch.randint(0, batch, (count,), generator=generator)

    held = caches[1].get_seq_length()
    if name == "append" or held == 0:
        step(caches, some(1, 12), batch, generator)
    elif name == "crop":
        count = some(1, held + 1)
        for cache in caches:
            cache.crop(-count)
    elif name == "reorder":
        order = rows(batch)
        for cache in caches:
            cache.reorder_cache(order)
    elif name == "repeat" and batch < 4:
        for cache in caches:
            cache.batch_repeat_interleave(2)
        return 2 * batch
    elif name == "select":
        chosen = rows(some(1, batch + 1))
        for cache in caches:
            cache.batch_select_indices(chosen)
        return len(chosen)
    elif name == "copy":
        left = [copy.deepcopy(cache) for cache in caches]
        step(caches, some(1, 12), batch, generator)  # goes one way, and what follows must not see it
        caches[:] = left
    elif name == "reset":
        for cache in caches:
            cache.reset()
        caches[1] = DynamicCache(config=CONFIG)  # its own reset keeps zeros of the old length
    return batch


def interleave(seed: int, moves: list[str], block_size: int, residual: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = KVCache(CONFIG, keys="exact", values="exact", block_size=block_size, residual=residual)
    caches: list[Any] = [ours, DynamicCache(config=CONFIG)]
    batch = 1
    for name in (*moves, "append"):
        batch = move(name, caches, batch, generator)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**20),
    st.lists(st.sampled_from(MOVES), min_size=1, max_size=14),
    st.integers(1, 9),
    st.integers(0, 7),
)
def test_any_interleaving_is_bit_equal(seed: int, moves: list[str], block_size: int, residual: int) -> None:
    interleave(seed, moves, block_size, residual)


def _forgets_the_crop(layer: CacheLayer, count: int) -> None:
    layer.num_open = 0


def _keeps_the_order(layer: CacheLayer, rows: Any) -> None:
    if len(rows) != layer.batch:
        ORIGINAL_REORDER(layer, rows)


ORIGINAL_REORDER = CacheLayer.reorder
MUTANTS: dict[str, Callable[..., None]] = {"crop": _forgets_the_crop, "reorder": _keeps_the_order}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheLayer, name, MUTANTS[name])
    with pytest.raises(AssertionError):
        for seed in range(20):
            interleave(seed, ["append", "repeat", "append", name, "append"] * 2, 4, 2)
