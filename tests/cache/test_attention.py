"""Attention over blocks against dense attention over what the same layer unpacks."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from qkv.cache.attention import attend
from qkv.cache.codec import AXES, BITS, Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.retention import Importance, Retention, Window
from qkv.cache.rotation import Rotation
from qkv.cache.settings import LayerSettings
from qkv.cache.storages import peak_nbytes

HEADS, GROUP = 2, 2


@pytest.fixture(autouse=True, params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both back ends, the native one where it is live."""
    monkeypatch.setenv("QKV_KERNELS", request.param)
    return str(request.param)


def filled(settings: LayerSettings, dim: int, value_dim: int, length: int, queries: int) -> CacheLayer:
    torch.manual_seed(0)
    layer, at = CacheLayer(settings), 0
    while at < length:
        count = min(17, length - at)
        layer.append(torch.randn(1, HEADS, count, dim), torch.randn(1, HEADS, count, value_dim))
        layer.commit()
        at += count
    layer.append(torch.randn(1, HEADS, queries, dim), torch.randn(1, HEADS, queries, value_dim))
    return layer


def check(settings: LayerSettings, dim: int, length: int, queries: int, value_dim: int = 0) -> None:
    layer = filled(settings, dim, value_dim or dim, length, queries)
    asked = torch.randn(HEADS * GROUP, queries, dim)
    found = attend(asked, layer.attendable()[0], scale=dim**-0.5, block_size=settings.block_size, with_mass=True)
    keys, values = layer.dense()
    mask = torch.ones(queries, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - queries)
    exact = torch.nn.functional.scaled_dot_product_attention(asked[None], keys, values, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(found.output, exact[0], atol=3e-5)
    assert found.mass is not None
    if layer.rows[0].sinks is None:
        assert torch.allclose(found.mass.sum(1), torch.full((queries,), float(HEADS * GROUP)), atol=1e-4)


@pytest.mark.parametrize("keys", [f"{n}:{a}" for n, a in itertools.product(BITS, AXES)])
@pytest.mark.parametrize("values", ["exact", "int8:token", "int4:channel", "int4:token", "int2:token", "nf4:token"])
def test_every_pair_of_codecs(keys: str, values: str) -> None:
    settings = LayerSettings(Codec.parse(f"{keys}:g16"), Codec.parse(f"{values}:g16"), block_size=16, residual=5)
    for dim in (8, 33, 80):
        check(settings, dim, 60, 3)


def test_wide_heads_unequal_widths_and_long_chunks() -> None:
    settings = LayerSettings(Codec("int4", "channel"), Codec("int2", "token"), block_size=64, residual=0)
    check(settings, 256, 300, 150, value_dim=48)


@pytest.mark.parametrize(
    "retain",
    [
        Window(21, sinks=4),
        Window(21, sinks=5, summary=8),
        Window(7, sinks=5),
        Importance(40, sinks=5),
        Window(1, sinks=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("residual", [0, 3, 12])
def test_every_policy_for_one_token(retain: Retention, residual: int) -> None:
    if not isinstance(retain, Importance) or residual < 12:
        check(
            LayerSettings(Codec("int8"), Codec("int4"), block_size=4, residual=residual, retain=retain),
            16,
            100,
            1,
        )


def test_a_window_masks_every_query_of_a_chunk() -> None:
    """{j < sinks or j > t - window} at absolute positions, for any chunks (HF#33691, #35350)."""
    torch.manual_seed(1)
    keys, values = torch.randn(2, 1, HEADS, 60, 16).unbind()
    asked = torch.randn(HEADS * GROUP, 60, 16)
    t, j = torch.arange(60)[:, None], torch.arange(60)[None]
    for sinks, window, chunk in ((0, 8, 7), (0, 1, 5), (4, 12, 60), (4, 12, 13), (3, 5, 1)):
        layer = CacheLayer(LayerSettings(block_size=4, residual=2, retain=Window(window, sinks=sinks)))
        parts = []
        for at in range(0, 60, chunk):
            layer.append(keys[:, :, at : at + chunk], values[:, :, at : at + chunk])
            view = layer.attendable()[0]
            parts.append(attend(asked[:, at : at + chunk], view, scale=0.25, block_size=4).output)
            layer.commit()
        visible = (j <= t) & ((j < sinks) | (j > t - window))
        exact = torch.nn.functional.scaled_dot_product_attention(
            asked[None], keys, values, attn_mask=visible, scale=0.25, enable_gqa=True
        )
        assert torch.allclose(torch.cat(parts, 1), exact[0], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5])
def test_sinks_are_turned_to_lie_before_the_window(chunk: int) -> None:
    rotation = Rotation(tuple(10.0 ** -(i / 4) for i in range(4)), trained_positions=10**6)
    retain = Window(6, sinks=2, rerotate=True)
    layer = CacheLayer(LayerSettings(block_size=2, residual=0, retain=retain, rotation=rotation))
    torch.manual_seed(2)
    plain, values = torch.randn(2, 1, HEADS, 40, 8).unbind()
    asked = torch.randn(HEADS * GROUP, 40, 8)
    where = torch.arange(40)
    keys, queries = rotation.move(plain, where), rotation.move(asked, where)
    for at in range(0, 40, chunk):
        layer.append(keys[:, :, at : at + chunk], values[:, :, at : at + chunk])
        found = attend(queries[:, at : at + chunk], layer.attendable()[0], scale=0.3, block_size=2).output
        layer.commit()
        for i in range(found.shape[1]):
            t = at + i
            seen = [p for p in range(t + 1) if p < 2 or p > t - 6]
            moved = torch.tensor([p if p >= 2 or t < 8 else t - 6 + 1 - 2 + p for p in seen])
            exact = torch.nn.functional.scaled_dot_product_attention(
                queries[None, :, t : t + 1], rotation.move(plain[:, :, seen], moved), values[:, :, seen],
                scale=0.3, enable_gqa=True,
            )  # fmt: skip
            assert torch.allclose(found[:, i : i + 1], exact[0], atol=1e-4)


def test_softcap_sink_logits_and_trees() -> None:
    layer = filled(LayerSettings(block_size=4, residual=2), 16, 16, 21, 3)
    asked, logits = torch.randn(HEADS * GROUP, 3, 16), torch.randn(HEADS * GROUP)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    found = attend(
        asked, layer.attendable()[0], scale=0.3, block_size=4, softcap=2.0, sink_logits=logits,
        positions=torch.tensor([21, 22, 22]), open_mask=tree,
    )  # fmt: skip
    keys, values = (t[0].repeat_interleave(GROUP, 0) for t in layer.dense())
    scores = torch.tanh(asked @ keys.transpose(1, 2) * 0.3 / 2) * 2
    scores[:, :, -3:] = scores[:, :, -3:].masked_fill(~tree, -torch.inf)
    joined = torch.cat((scores, logits[:, None, None].expand(-1, 3, 1)), -1).softmax(-1)[..., :-1]
    assert torch.allclose(found.output, joined @ values, atol=1e-5)


def test_float64_stays_float64() -> None:
    layer = CacheLayer(LayerSettings(block_size=4, residual=2))
    keys, values = torch.randn(2, 1, HEADS, 30, 8, dtype=torch.float64).unbind()
    layer.append(keys, values)
    layer.commit()
    layer.append(keys[:, :, :1], values[:, :, :1])
    asked = torch.randn(HEADS * GROUP, 1, 8, dtype=torch.float64)
    found = attend(asked, layer.attendable()[0], scale=1.0, block_size=4).output
    exact = torch.nn.functional.scaled_dot_product_attention(asked[None], *layer.dense(), scale=1.0, enable_gqa=True)
    assert torch.allclose(found, exact[0], atol=1e-14)


def test_a_step_unpacks_one_run_at_a_time(backend: str) -> None:
    """Transient of a step: a tile of 512 tokens, whatever the length; of the native one, a fraction of that."""
    settings = LayerSettings(Codec("int8", "channel"), Codec("int8", "token"))
    peaks = []
    for length in (2048, 8192):
        layer = CacheLayer(settings)
        layer.append(torch.randn(1, HEADS, length, 64), torch.randn(1, HEADS, length, 64))
        layer.commit()
        layer.append(torch.randn(1, HEADS, 1, 64), torch.randn(1, HEADS, 1, 64))
        view, asked = layer.attendable()[0], torch.randn(HEADS * GROUP, 1, 64)
        peaks.append(peak_nbytes(partial(attend, asked, view, scale=0.1, block_size=64)))
    tile = 4 * 512 * HEADS * 64 * 4
    assert max(peaks) < tile / 8 or (backend == "torch" and peaks[0] == peaks[1] < tile)
