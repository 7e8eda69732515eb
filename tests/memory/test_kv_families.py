"""What is predicted from a config alone is what real caches of real families hold, byte for byte."""

from __future__ import annotations

import warnings
from typing import Any, Final

import pytest
import torch

from qkv.cache.retention import Window
from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache
from qkv.memory.footprint import footprint
from qkv.memory.live import cache_nbytes
from tests.helpers import BASE, GPT2, fails, prompt

LATENT: Final[dict[str, Any]] = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR: Final[dict[str, Any]] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
JAMBA: Final[dict[str, Any]] = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_d_conv": 4, "use_mamba_kernels": False,
}  # fmt: skip
FAMILIES: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "gpt2": (GPT2, "full", "multi-head"),
    "llama": (BASE, "full", "grouped-query"),
    "gpt_bigcode": (GPT2, "full", "multi-query"),
    "falcon": (BASE, "full", "multi-query"),
    "mistral": ({**BASE, "sliding_window": 8}, "sliding 8", "grouped-query"),
    "gemma3_text": (
        {**BASE, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "full",
        "grouped-query",
    ),
    "deepseek_v2": ({**BASE, **LATENT}, "full", "latent (MLA)"),
    "deepseek_v3": ({**BASE, **LATENT}, "full", "latent (MLA)"),
    "qwen3_next": ({**BASE, **LINEAR}, "full", "grouped-query"),
    "jamba": ({**BASE, **JAMBA}, "full", "grouped-query"),
    "mamba": ({**BASE, "state_size": 4}, "state", ""),
}
"""Model types to their config, and a kind of layer that they have."""


def model_of(family: str) -> Any:
    """A tiny random model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def filled(model: Any, cache: Any, tokens: int, batch: int) -> Any:
    """The cache after that many tokens, the last of them alone."""
    ids = prompt(tokens, batch=batch)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in (ids[:, :-1], ids[:, -1:]):
            model(part, use_cache=True, **{cache_argument(model): cache})
    return cache


def check_stock(family: str, tokens: int) -> None:
    """Transformers' own cache."""
    from transformers import DynamicCache

    model = model_of(family)
    predicted = footprint(model, context=tokens, batch=2)
    cache = filled(model, DynamicCache(config=model.config), tokens, 2)
    assert predicted.kv_nbytes == cache_nbytes(cache), predicted.kv_note
    assert predicted.kv_nbytes == sum(row.nbytes for row in predicted.kv_rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [3, 30])
def test_is_what_transformers_holds(family: str, tokens: int) -> None:
    check_stock(family, tokens)
    rows = footprint(model_of(family), context=tokens).kv_rows
    assert FAMILIES[family][1:] in {(row.kind, row.heads) for row in rows}
    assert sum(row.num_layers for row in rows) == model_of(family).config.num_hidden_layers


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_bigcode", "falcon", "mistral", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("retain", [None, Window(20, sinks=2)])
def test_is_what_our_cache_holds(family: str, retain: Any) -> None:
    model = model_of(family)
    sizes: dict[str, Any] = {"block_size": 8, "residual": 8, "keys": "int8:token", "values": "int4"}
    settings = {**sizes, "retain": retain}
    for tokens in (7, 16, 37):
        batch = 2 if retain is None else 1  # eviction in a batch needs to know where padding is
        cache = filled(model, KVCache(model.config, **settings), tokens, batch)
        predicted = footprint(model, context=tokens, batch=batch, **settings)
        assert predicted.kv_nbytes == cache_nbytes(cache), (tokens, predicted.kv_note)


def test_a_model_that_our_cache_cannot_hold_is_said() -> None:
    assert "held in blocks" in footprint(model_of("mamba"), context=9, keys="int8").kv_note


def test_a_wrong_window_or_a_forgotten_state_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of the law: sliding layers counted in full, and states left out."""
    from dataclasses import replace

    from qkv.integration import anatomy

    cached = anatomy._cached
    for family, change in (("mistral", "window"), ("qwen3_next", "state")):

        def mutant(layer: Any, change: str = change) -> Any:
            found: Any = cached(layer)
            if change == "state":
                return replace(found, state_nbytes=found.state_nbytes // 2)
            return replace(found, shape=replace(found.shape, window=None))

        anatomy._ask.cache_clear()
        monkeypatch.setattr(anatomy, "_cached", mutant)
        assert fails(lambda family=family: check_stock(family, 30))  # type: ignore[misc]
    monkeypatch.setattr(anatomy, "_cached", cached)
    anatomy._ask.cache_clear()
