"""A live decoder patched, restored and counted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.hf_cache import KVCache
from tests.helpers import frozen, prompt, tiny


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_a_live_decoder_is_patched_and_restored(family: str) -> None:
    model = tiny(family)
    decoder = SpeculativeDecoder(model, source="self:int8", length=3)
    before, state = decoder.generate(prompt(), max_new_tokens=12), frozen(model)
    decoder.patch_(weights="nf4", draft_weights="int4", keys="int8", values="int8", block_size=4, residual=4)
    after = decoder.generate(prompt(), max_new_tokens=12)
    plain = SpeculativeDecoder(model, cache=decoder.cache).generate(prompt(), max_new_tokens=12)
    assert torch.equal(after, plain) and isinstance(decoder.last_cache, KVCache)
    footprint = decoder.footprint()
    assert footprint.before is not None and footprint.target < footprint.before.target and footprint.kept > 0
    assert "kept" in str(footprint) and footprint.total > 0
    with pytest.raises(QkvError, match="already"):
        decoder.patch_(weights="int8")
    decoder.unpatch_()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert decoder.cache is None and decoder.footprint().kept == 0
    assert torch.equal(decoder.generate(prompt(), max_new_tokens=12), before)
    for wrong in ({}, {"weights": "int77"}, {"weights": "nf4", "keys": "int99"}):
        with pytest.raises(QkvError):
            decoder.patch_(**wrong)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def held_nbytes() -> int:
    """Bytes of all tensor storages that are alive, each once."""
    gc.collect()
    found = [value for value in gc.get_objects() if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def test_footprint_is_what_is_held() -> None:
    """Against all storages of the process: originals that wait, what kernels packed, both caches."""
    model = tiny("llama", dtype=torch.bfloat16, hidden_size=64)
    decoder = SpeculativeDecoder(model, source="self:int8", length=3)
    others = held_nbytes() - decoder.footprint().total
    for weights in (None, "int4", "nf4"):
        if weights:
            decoder.patch_(weights=weights, draft_weights="int4", keys="int8", values="int8", block_size=8)
        decoder.generate(prompt(), max_new_tokens=20)
        footprint = decoder.footprint()
        assert abs(held_nbytes() - others - footprint.total) <= 2048, weights  # lengths of blocks, tables
        assert (footprint.kept > 0) == bool(weights) and footprint.cache > 0 and footprint.draft_cache > 0
        decoder.unpatch_()


def test_a_self_draft_shares_what_is_not_quantized() -> None:
    model = tiny("llama")
    decoder = SpeculativeDecoder(model, source="self:nf4")
    footprint = decoder.footprint()
    assert 0 < footprint.draft < footprint.target / 2
    source: Any = decoder.source
    assert source.model.model.embed_tokens.weight is model.model.embed_tokens.weight
