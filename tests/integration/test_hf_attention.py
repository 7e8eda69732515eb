"""Our attention as an implementation: set, undone, shared, and refusing what it cannot do right."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from qkv.errors import QkvError
from qkv.integration.compat import cache_argument
from qkv.integration.hf_attention import BlockHandle, LazyMask
from qkv.integration.hf_cache import KVCache
from qkv.integration.hf_dense import attend_dense


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
    given = {} if cache is None else {cache_argument(model): cache}
    found: torch.Tensor = model(ids, use_cache=cache is not None, **given, **options).logits
    return found


def test_attach_and_detach_leave_the_model_as_it_was(model: Any) -> None:
    model.set_attn_implementation("eager")
    first, second = KVCache(model.config).attach(model), KVCache(model.config).attach(model)
    assert model.config._attn_implementation == "qkv"
    first.detach()
    first.detach()
    assert model.config._attn_implementation == "qkv"
    second.detach()
    assert model.config._attn_implementation == "eager"


def test_a_cache_that_is_dropped_gives_its_claim_back(model: Any) -> None:
    cache = KVCache(model.config).attach(model)
    del cache
    gc.collect()
    assert model.config._attn_implementation == "sdpa"


def test_an_attached_model_still_works_with_other_caches_and_none(model: Any) -> None:
    ids = torch.randint(1, 64, (2, 30))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    expected = logits(model, ids, attention_mask=mask)
    cache = KVCache(model.config).attach(model)
    for other in (None, DynamicCache(config=model.config), KVCache(model.config)):
        assert torch.allclose(
            logits(model, ids, other, attention_mask=mask)[mask.bool()], expected[mask.bool()], atol=1e-5
        )
    cache.detach()


def test_an_attached_cache_in_an_unattached_model_is_refused(model: Any) -> None:
    cache = KVCache(model.config).attach(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(QkvError, match="detach"):
        logits(model, torch.ones(1, 5, dtype=torch.long), cache)


def test_handles_and_masks_that_are_touched_say_so() -> None:
    handle, mask = BlockHandle(None), LazyMask({})  # type: ignore[arg-type]
    with pytest.raises(QkvError, match="'shape' of its keys"):
        _ = handle.shape
    with pytest.raises(QkvError, match="'dtype' of its attention mask"):
        _ = mask.dtype
    with pytest.raises(QkvError, match="twice"):
        handle.take()


def test_a_mask_of_another_pattern_is_refused(model: Any) -> None:
    cache, ids = KVCache(model.config).attach(model), torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(QkvError, match="another pattern"):
        logits(model, ids, cache, attention_mask=torch.zeros(1, 1, 5, 5))


def test_models_that_share_keys_between_layers_are_refused(model: Any) -> None:
    model.config.num_kv_shared_layers = 1
    with pytest.raises(QkvError, match="shares keys"):
        KVCache(model.config).attach(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(model: Any, dtype: torch.dtype) -> None:
    model, ids = model.to(dtype), torch.randint(1, 64, (1, 60))
    parts = []
    for cache in (
        DynamicCache(config=model.config),
        KVCache(model.config, keys="exact", values="exact", residual=0).attach(model),
    ):
        parts.append(torch.cat([logits(model, ids[:, :40], cache), logits(model, ids[:, 40:], cache)], 1))
    tolerance = {torch.bfloat16: 0.15, torch.float16: 0.02, torch.float64: 1e-12}[dtype]
    assert parts[0].dtype == parts[1].dtype == dtype
    assert float((parts[0] - parts[1]).abs().max()) < tolerance


def test_a_single_query_over_plain_tensors_packs_its_group() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, 1, 8)
    key, value = torch.randn(2, 2, 3, 20, 8).unbind()
    mask = torch.rand(2, 1, 1, 20) < 0.8
    for built in (None, mask):
        found = attend_dense(None, query, key, value, built, 0.0, {"scaling": 0.3})
        exact = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=built, scale=0.3, enable_gqa=True
        )
        assert torch.allclose(found, exact.transpose(1, 2), atol=1e-6)
