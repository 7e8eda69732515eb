"""Retention: what stays, within what budget."""

from __future__ import annotations

import pytest
import torch

from qkv.cache.codec import Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.plan import LayerShape, kv_nbytes
from qkv.cache.retention import Importance, KeepAll, RandomBlocks, Retention, Window
from qkv.cache.retention.sizes import parse_budget, parse_bytes
from qkv.cache.settings import LayerSettings
from qkv.errors import QkvError


def run(layer: CacheLayer, length: int, chunk: int = 1, batch: int = 1) -> None:
    for at in range(0, length, chunk):
        count = min(chunk, length - at)
        layer.append(*(torch.randn(batch, 2, count, 8) for _ in range(2)))
        layer.commit()


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_importance_never_holds_more_than_its_tokens(chunk: int) -> None:
    layer = CacheLayer(LayerSettings(block_size=4, residual=0, retain=Importance(24, sinks=4, recent=8)))
    for _ in range(100 // chunk):
        run(layer, chunk, chunk)
        assert layer.num_held <= 24
        row = layer.rows[0]
        held = {p for block in row.blocks for p in range(block.start, block.end)} | set(range(row.sealed, len(layer)))
        assert set(range(max(0, len(layer) - 8), len(layer))) <= held
    assert len(layer) == 100 // chunk * chunk
    assert layer.rows[0].sinks is not None and layer.rows[0].sinks.num_tokens == 4


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_budget_in_bytes_is_a_promise(batch: int) -> None:
    budget = 40_000
    retain = Importance(budget="40kB", sinks=4)
    settings = LayerSettings(Codec("int8"), Codec("int4"), 8, 8, retain, byte_budget=budget)
    layer = CacheLayer(settings)
    for chunk in (100, 1, 1, 30, 7, 1, 200):
        run(layer, chunk, chunk, batch)
        layer.rows[0].mass = layer.rows[0].focus = torch.zeros(len(layer.rows[0].blocks) + 2)
        assert layer.nbytes <= budget
    layer.reorder([0] * (batch + 1))
    assert layer.nbytes <= budget


def test_mass_decides_what_stays() -> None:
    layer = CacheLayer(LayerSettings(block_size=4, residual=4, retain=Importance(28, sinks=0, recent=8)))
    for _ in range(60):
        layer.append(*(torch.randn(1, 2, 1, 8) for _ in range(2)))
        row = layer.rows[0]
        wanted = [1.0 if block.start == 8 else 0.01 for block in row.blocks] + [0.1] * 3
        layer.observe(0, torch.tensor([wanted]), torch.tensor([wanted]), None)
        layer.commit()
    assert 8 in [block.start for block in layer.rows[0].blocks]


def test_a_window_keeps_exact_sinks_and_frees_blocks() -> None:
    layer = CacheLayer(LayerSettings(Codec("int4"), Codec("int4"), 4, 2, Window(10, sinks=6)))
    keys = torch.randn(1, 2, 80, 8)
    for at in range(80):
        layer.append(keys[:, :, at : at + 1], keys[:, :, at : at + 1])
        layer.commit()
    sinks = layer.rows[0].sinks
    assert sinks is not None and torch.equal(sinks.store.decode(sinks)[0], keys[0, :, :6])
    assert len(layer.rows[0].blocks) <= 3 and layer.visible() == 6 + 9


def test_a_summary_stays_within_its_tokens_and_keeps_values_means() -> None:
    layer = CacheLayer(LayerSettings(block_size=4, residual=2, retain=Window(10, sinks=2, summary=6)))
    run(layer, 200)
    row = layer.rows[0]
    assert row.summary is not None and row.summary.num_tokens <= 6
    assert list(row.summary_positions) == sorted(row.summary_positions)
    ones = CacheLayer(LayerSettings(block_size=4, residual=2, retain=Window(10, sinks=2, summary=6)))
    for _ in range(60):
        ones.append(torch.randn(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
        ones.commit()
    assert torch.allclose(ones.dense()[1], torch.ones(1))


def test_crop_refuses_what_was_evicted_and_changes_nothing() -> None:
    layer = CacheLayer(LayerSettings(block_size=4, residual=3, retain=Window(10, sinks=2)))
    run(layer, 60)
    held = layer.num_held
    with pytest.raises(QkvError, match="evicted"):
        layer.crop(30)
    assert len(layer) == 60 and layer.num_held == held
    layer.crop(60)
    assert len(layer) == 0 and layer.nbytes == 0


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 127, 128, 129, 1000, 8192])
@pytest.mark.parametrize("retain", [KeepAll(), Window(300, sinks=4), Importance(400, sinks=4)], ids=str)
@pytest.mark.parametrize("codecs", [("int8", "int8"), ("int4", "int2"), ("exact", "nf4")])
def test_the_formula_is_what_is_held(tokens: int, retain: Retention, codecs: tuple[str, str]) -> None:
    settings = LayerSettings(Codec.parse(codecs[0], "channel"), Codec.parse(codecs[1]), retain=retain)
    layer = CacheLayer(settings)
    if tokens:
        layer.append(torch.randn(2, 3, tokens, 64), torch.randn(2, 3, tokens, 64))
        layer.commit()
    shape = LayerShape(3, 64, 64)
    formula = kv_nbytes([shape], tokens, 2, keys=codecs[0], values=codecs[1], dtype=torch.float32, retain=retain)
    if isinstance(retain, Importance):
        assert layer.nbytes <= formula
    else:
        assert layer.nbytes == formula


def test_4_bits_take_a_seventh_of_float32() -> None:
    shape, args = LayerShape(3, 64, 64), {"keys": "int4", "values": "int4", "dtype": torch.float32}
    for tokens in range(8192, 8192 + 64):
        whole = kv_nbytes([shape], tokens, dtype=torch.float32)
        assert kv_nbytes([shape], tokens, **args) / whole <= 0.155  # type: ignore[arg-type]


def test_budgets_and_shares_are_read() -> None:
    assert parse_bytes("512MB") == 512 * 10**6 and parse_bytes("2GiB") == 2**31 and parse_bytes("1.5 kB") == 1500
    assert parse_budget(64) == ("tokens", 64) and parse_budget(0.5) == ("fraction", 0.5)
    pyramid = Importance(100, layers="pyramid").shares(5)
    assert sum(pyramid) == pytest.approx(1) and pyramid == sorted(pyramid, reverse=True)
    assert Importance(100, layers=[1.0, 3.0]).shares(2) == [0.25, 0.75]
    assert RandomBlocks(100).needs_mass is False


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "lots", "5", None])
def test_budgets_that_are_none_are_refused(budget: object) -> None:
    with pytest.raises(QkvError):
        Importance(budget)  # type: ignore[arg-type]


def test_budgets_too_small_say_what_is_needed() -> None:
    layer = CacheLayer(LayerSettings(block_size=64, residual=64, retain=Importance(100)))
    with pytest.raises(QkvError, match=r"195.*raise it"):
        run(layer, 1)
    for wrong in ({"size": 0}, {"size": 5, "sinks": -1}, {"size": 2.5}):
        with pytest.raises(QkvError, match="whole number"):
            Window(**wrong)  # type: ignore[arg-type]
