"""What prepared models do between their products: norms and the attention of a few tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.decoding import prepare_, unprepare_
from qkv.integration.hf_cache import KVCache
from qkv.integration.step import NAME, SpedUp, slow_down_, speed_up_
from qkv.quantizers.kernels import native, native_step
from tests.helpers import prompt, tiny

needs_library = pytest.mark.skipif(native.unavailable() is not None or native.EXACT, reason="needs the native library")
needs_avx512 = pytest.mark.skipif(native.level() != "avx512", reason="needs AVX-512")
pytestmark = needs_library

FAMILIES = ("llama", "qwen3", "gemma3", "mistral")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def norm_of(kind: type[Any], columns: int, eps: float) -> Any:
    norm = kind(columns, eps=eps).bfloat16().requires_grad_(False)
    norm.weight.add_(randn(columns, seed=1) / 4)
    return norm


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, nn.RMSNorm])
@given(columns=st.integers(2, 700), rows=st.integers(1, 5), eps=st.sampled_from([1e-6, 1e-5, 1e-2]))
def test_a_norm_gives_what_the_models_own_gives(kind: type[Any], columns: int, rows: int, eps: float) -> None:
    stock, fast = norm_of(kind, columns, eps), norm_of(kind, columns, eps)
    if not speed_up_(fast).norms:
        assert kind is nn.RMSNorm, "a norm of a model was not known"  # torch's rounds elsewhere
        return
    x = randn(rows, columns)
    assert torch.allclose(fast(x), stock(x), rtol=2**-7, atol=0)
    assert (fast(x) != stock(x)).sum() <= 1 + 0.02 * x.numel()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    exact = exact * (stock.weight.double() + (kind is GemmaRMSNorm))
    assert torch.allclose(fast(x).double(), exact, rtol=2**-7, atol=0)


class OddRMSNorm(nn.Module):
    """By its name a norm, by what it gives another."""

    def __init__(self, columns: int, eps: float) -> None:
        super().__init__()
        self.inner, self.weight, self.eps = LlamaRMSNorm(columns, eps), nn.Parameter(torch.ones(columns)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 1.02  # type: ignore[no-any-return]


class GatedRMSNorm(OddRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        return super().forward(x) * gate


@pytest.mark.parametrize("kind", [OddRMSNorm, GatedRMSNorm])
def test_a_norm_that_gives_something_else_is_left_alone(kind: type[Any]) -> None:
    norm = norm_of(kind, 32, 1e-5)
    assert speed_up_(norm) == SpedUp(("inner",), ("",)) and "forward" not in vars(norm)


def test_what_is_not_served_is_the_norms_own() -> None:
    stock, fast = norm_of(LlamaRMSNorm, 48, 1e-5), norm_of(LlamaRMSNorm, 48, 1e-5)
    assert speed_up_(fast) == SpedUp(("",))
    for x in (randn(2, 96)[:, ::2], randn(48).float(), randn(0, 48), randn(2000, 48)):
        assert torch.equal(fast(x), stock(x))
    x = randn(2, 48).requires_grad_()
    fast(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(copy.deepcopy(fast)(x), stock(x))
    slow_down_(fast)
    assert vars(fast).keys() == vars(stock).keys()


@needs_avx512
@given(
    batch=st.integers(1, 3), kv_heads=st.integers(1, 3), group=st.integers(1, 4), dim=st.sampled_from([8, 33, 64, 128]),
    queries=st.integers(1, 16), before=st.integers(0, 200), laid=st.booleans(),
)  # fmt: skip
def test_attention_of_a_few_tokens(
    batch: int, kv_heads: int, group: int, dim: int, queries: int, before: int, laid: bool
) -> None:
    tokens = before + queries
    query = randn(batch, kv_heads * group, queries, dim)
    key, value = randn(batch, kv_heads, tokens, dim, seed=1), randn(batch, kv_heads, tokens, dim, seed=2)
    if laid:  # as caches that lay tokens first give them
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    assert native_step.serves_attention(query, key, value)
    found = native_step.attend_few(query, key, value, dim**-0.5)
    keys, values = (x.double().repeat_interleave(group, 1) for x in (key, value))
    mask = torch.ones(queries, tokens, dtype=torch.bool).tril(before)
    wanted = nn.functional.scaled_dot_product_attention(query.double(), keys, values, mask).transpose(1, 2)
    assert torch.allclose(found.double(), wanted, rtol=0, atol=0.01 * float(value.abs().max()))


@needs_avx512
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prepared_model_decodes_as_before_and_comes_back(family: str) -> None:
    model, plain = tiny(family, dtype=torch.bfloat16), tiny(family, dtype=torch.bfloat16)
    report = prepare_(model)
    norms = [name for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
    assert sorted(report.between.norms) == sorted(norms) and f"{len(norms)} norms" in str(report)
    assert report.between.attention and "attention of a few tokens" in str(report)
    assert prepare_(model).between.norms == report.between.norms, "a second time"
    assert model.config._attn_implementation == NAME
    ids, options = prompt(12, batch=2), {"max_new_tokens": 12, "do_sample": False, "output_logits": True}
    with torch.inference_mode():
        found, wanted = (each.generate(ids, return_dict_in_generate=True, **options) for each in (model, plain))
        same = int((found.sequences == wanted.sequences).all(0).sum()) - ids.shape[1]
        assert same > 0
        for a, b in list(zip(found.logits, wanted.logits, strict=True))[:same]:
            assert torch.allclose(a, b, rtol=0, atol=0.05 * float(b.abs().max()))
        unprepare_(model)
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert "forward" not in {name for module in model.modules() for name in vars(module)}


@needs_avx512
def test_the_native_attention_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    calls: list[int] = []
    prepare_(model)
    attend = native_step.attend_few

    def counted(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        calls.append(key.shape[2])
        return attend(query, key, value, scale)

    monkeypatch.setattr(native_step, "attend_few", counted)
    model.generate(prompt(5), max_new_tokens=4, do_sample=False, min_new_tokens=4)
    assert calls == [n for n in (5, 6, 7, 8) for _ in range(model.config.num_hidden_layers)]
    calls.clear()
    decoder = SpeculativeDecoder(model, source="lookup", length=3)
    decoder.generate(torch.tensor([[1, 2, 3, 1, 2]]), max_new_tokens=4, do_sample=False)
    assert decoder.stats.target_calls == len(calls) // model.config.num_hidden_layers  # drafts are verified by it, too
    calls.clear()
    padded = torch.tensor([[0, 0, 1, 1, 1]])  # masked: not served
    model.generate(prompt(5), attention_mask=padded, max_new_tokens=4, do_sample=False, min_new_tokens=4)
    assert not calls


@needs_avx512
def test_an_attached_cache_gives_the_prepared_attention_back(tmp_path: Any) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    prepare_(model)
    cache = KVCache(model.config)
    cache.attach(model)
    assert model.config._attn_implementation == "qkv"
    cache.detach()
    assert model.config._attn_implementation == NAME
    cache.attach(model)
    unprepare_(model)
    assert model.config._attn_implementation == "qkv", "the cache was detached"
    prepare_(model)
    cache.detach()
    assert model.config._attn_implementation == NAME
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text(encoding="utf-8")


@needs_avx512
def test_a_model_that_does_not_compute_in_bfloat16_keeps_its_attention() -> None:
    model = tiny("llama")
    report = prepare_(model)
    assert not report.between.attention and not report.between.norms and len(report.between.other_norms) == 5
    assert "5 norms left" in str(report) and model.config._attn_implementation == "sdpa"


@needs_avx512
def test_a_mask_that_changes_is_read_again() -> None:
    """One tensor, first the causal mask and then another."""
    model, plain = tiny("llama", dtype=torch.bfloat16), tiny("llama", dtype=torch.bfloat16)
    prepare_(model)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with torch.inference_mode():
        for _ in range(2):
            found, wanted = (each(prompt(6), attention_mask=mask).logits for each in (model, plain))
            assert torch.allclose(found, wanted, rtol=0, atol=0.05 * float(wanted.abs().max()))
            mask[..., 1:, 0] = False
