"""A real model through the cache: quality, bytes, peak, tokens, and prefix hits."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from qkv.cache.plan import LayerShape, kv_nbytes
from qkv.cache.prefix import PrefixCache
from qkv.cache.storages import peak_nbytes
from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache

pytestmark = pytest.mark.slow
SHAPES = [LayerShape(3, 64, 64)] * 30


@torch.no_grad()
def perplexity(model: Any, ids: Tensor, cache: KVCache, count_from: int) -> float:
    cache.attach(model)
    losses = []
    for at in range(0, ids.shape[1], 64):
        logits = model(ids[:, at : at + 64], **{cache_argument(model): cache}).logits[0]
        targets = ids[0, at + 1 : at + 65]
        losses.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
    cache.detach()
    return math.exp(float(torch.cat(losses)[count_from - 1 :].mean()))


def test_codecs_cost_little(model: Any, text: Tensor) -> None:
    ids = text[:, :1024]
    exact = perplexity(model, ids, KVCache(model.config, keys="exact", values="exact"), 256)
    for keys, values, limit in (("int8", "int8", 0.001), ("int4", "int4", 0.02), ("int2", "int2", 0.35)):
        found = perplexity(model, ids, KVCache(model.config, keys=keys, values=values), 256)
        assert found / exact - 1 <= limit, (keys, values, found, exact)


@torch.no_grad()
def test_bytes_and_peak_at_8192_tokens(model: Any) -> None:
    """Layers filled directly; then one decode step of the whole model, its storages tracked."""
    for codec in ("int8", "int4"):
        cache = KVCache(model.config, keys=codec, values=codec).attach(model)
        for layer in cache.layers:
            for _ in range(8):
                layer.append(torch.randn(1, 3, 1024, 64), torch.randn(1, 3, 1024, 64), None)
                layer.core.commit()
        formula = kv_nbytes(SHAPES, 8192, keys=codec, values=codec, dtype=torch.float32)
        assert abs(cache.nbytes / formula - 1) < 0.01
        if codec == "int4":
            assert cache.nbytes <= 0.155 * kv_nbytes(SHAPES, 8192, dtype=torch.float32)
        step = torch.tensor([[5]])
        before = cache.nbytes
        peak = peak_nbytes(partial(model, step, **{cache_argument(model): cache}))
        assert peak <= 6_000_000, peak
        assert cache.nbytes - before < 100_000
        cache.detach()


@torch.no_grad()
def test_exact_generation_equals_dynamic_cache(model: Any, text: Tensor) -> None:
    prompt = text[:, :120]
    for mode in ({}, {"prefill_chunk_size": 64}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 6}):
        found = []
        for cache in (
            DynamicCache(config=model.config),
            KVCache(model.config, keys="exact", values="exact").attach(model),
        ):
            given = {cache_argument(model): cache}
            found.append(model.generate(prompt, max_new_tokens=24, do_sample=False, **given, **mode))
        assert torch.equal(*found), mode
        cache.detach()


@torch.no_grad()
def test_a_prefix_hit_is_fast_and_gives_the_same_tokens(model: Any, text: Tensor) -> None:
    ids = text[:, :574]
    shared = PrefixCache("1GB", make=lambda: KVCache(model.config, keys="int8", values="int8").attach(model))

    def prefill(skip: int, cache: Any) -> float:
        began = time.process_time()
        model(ids[:, skip:], **{cache_argument(model): cache}, logits_to_keep=1)
        return time.process_time() - began

    miss, matched = shared.lookup(ids)
    assert matched == 0
    slow = prefill(0, miss)
    shared.store(ids, miss)
    ratios = []
    for _ in range(3):
        hit, matched = shared.lookup(ids)
        assert matched == 512
        ratios.append(prefill(matched, hit) / slow)
    assert min(ratios) < 0.25, ratios
    given = [{cache_argument(model): cache} for cache in (miss, shared.lookup(ids)[0])]
    miss.crop(-1)
    first, second = (model.generate(ids, max_new_tokens=24, do_sample=False, **g) for g in given)
    assert torch.equal(first, second)
    shared.clear()
    miss.detach()
    hit.detach()
