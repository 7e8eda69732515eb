"""Attention over blocks through the Triton walk, interpreted; tests/test_triton.py runs this in its own process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.cache import attention, attention_torch, attention_triton
from qkv.cache.attention_case import Asked
from qkv.cache.codec import Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.retention import Importance, KeepAll, Retention, Window
from qkv.cache.settings import LayerSettings
from qkv.quantizers.kernels.triton_live import interpreted

assert interpreted() and attention_triton.unavailable() is None

HEADS, GROUP, DIM = 2, 2, 32
RETAIN: dict[str, Retention] = {
    "everything": KeepAll(),
    "a window": Window(70, sinks=4),
    "a window and a summary": Window(70, sinks=4, summary=8),
    "the important": Importance(budget=96),
}


def filled(codec: str, retain: Retention, length: int, tokens: int) -> CacheLayer:
    """A layer of one row: ``length`` committed tokens and ``tokens`` open ones."""
    torch.manual_seed(length + tokens)
    chosen = LayerSettings(
        keys=Codec.parse(codec, "channel"), values=Codec.parse(codec, "token"), retain=retain, block_size=32, residual=0
    )
    layer = CacheLayer(chosen)

    def random(count: int) -> Tensor:
        return torch.randn(1, HEADS, count, DIM)

    for start in range(0, length, 40):
        count = min(40, length - start)
        layer.append(random(count), random(count))
        layer.commit()
    layer.append(random(tokens), random(tokens))
    return layer


def check(asked: Asked) -> None:
    assert attention_triton.refuses(asked) is None
    got, want = attention_triton.attend(asked), attention_torch.attend(asked)
    assert torch.allclose(got.output, want.output, atol=2e-5)
    for mine, theirs in ((got.mass, want.mass), (got.focus, want.focus)):
        assert (mine is None) == (theirs is None) == (not asked.with_mass)
        assert mine is None or theirs is None or torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("name", RETAIN)
def test_it_is_the_torch_attention(codec: str, name: str) -> None:
    """Windows, sinks, summaries, evicted blocks, soft-caps, learned sinks and mass."""
    for tokens in (1, 5):
        layer = filled(codec, RETAIN[name], 200, tokens)
        view = layer.attendable()[0]
        queries = torch.randn(HEADS * GROUP, tokens, DIM)
        check(Asked(queries, view, 0.2, 32))
        check(Asked(queries, view, 0.2, 32, 3.0, torch.randn(HEADS * GROUP), with_mass=True))


@settings(max_examples=8)
@given(st.sampled_from(["int8", "int4"]), st.integers(33, 150), st.integers(1, 9), st.booleans())
def test_any_length(codec: str, length: int, tokens: int, with_mass: bool) -> None:
    layer = filled(codec, KeepAll(), length, tokens)
    view = layer.attendable()[0]
    check(Asked(torch.randn(HEADS * GROUP, tokens, DIM), view, 0.2, 32, with_mass=with_mass))


def test_a_table_is_sent_to_the_device_once_and_again_when_blocks_moved() -> None:
    layer = filled("int8", KeepAll(), 64, 1)
    queries = torch.randn(HEADS * GROUP, 1, DIM)
    first = attention_triton._pages(layer.attendable()[0], queries.device)
    assert attention_triton._pages(layer.attendable()[0], queries.device) is first
    layer.commit()
    for _ in range(3):
        layer.append(torch.randn(1, HEADS, 40, DIM), torch.randn(1, HEADS, 40, DIM))
        layer.commit()
    layer.append(torch.randn(1, HEADS, 1, DIM), torch.randn(1, HEADS, 1, DIM))
    view = layer.attendable()[0]
    assert attention_triton._pages(view, queries.device) is not first
    check(Asked(queries, view, 0.2, 32))


def test_what_it_does_not_serve_goes_to_torch() -> None:
    queries = torch.randn(HEADS * GROUP, 1, DIM)
    layers = [filled("int8", KeepAll(), 5, 1), filled("nf4", KeepAll(), 64, 1), filled("int8", KeepAll(), 64, 1)]
    fresh, nf4, int8 = (Asked(queries, layer.attendable()[0], 0.2, 32) for layer in layers)
    assert attention_triton.refuses(fresh) == "there is no sealed block to read"
    assert "not nf4" in str(attention_triton.refuses(nf4)) and attention_triton.refuses(int8) is None
    traced = Asked(queries.clone().requires_grad_(), int8.view, 0.2, 32)
    assert attention_triton.refuses(traced) == "neither traced nor differentiated"
    assert list(attention.BACKENDS) == ["native", "triton", "torch"]
