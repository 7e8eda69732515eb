"""Peaks never fall as context or batch grow, and what fits a memory fits exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.cache.plan import LayerShape
from qkv.cache.retention import Importance, Window
from qkv.errors import QkvError
from qkv.integration.anatomy import FULL, SLIDING, Anatomy, CachedLayer
from qkv.memory.footprint import footprint
from qkv.memory.forecast import Forecast
from qkv.memory.kv import KvPlan
from qkv.memory.workspace import Steps
from qkv.quantizers.format import Format
from tests.helpers import fails, tiny

LAYERS = st.sampled_from(
    [
        CachedLayer(FULL, LayerShape(2, 16, 16)),
        CachedLayer(FULL, LayerShape(1, 32, 8)),
        CachedLayer(SLIDING, LayerShape(4, 16, 16, 40)),
        CachedLayer("LinearAttentionLayer", None, 0, 4096),
        CachedLayer("DynamicIndexedLayer", LayerShape(1, 16, 8), 64),
        CachedLayer("DummyLayer"),
    ]
)
SETTINGS = st.sampled_from(
    [
        {},
        {"keys": "int8", "values": "int4", "block_size": 16, "residual": 8},
        {"keys": "exact", "values": "exact", "block_size": 16, "residual": 16, "retain": Window(50, sinks=3)},
        {"keys": "int4", "values": "int8", "block_size": 16, "residual": 16, "retain": Importance(100, sinks=4)},
        {"keys": "int8", "values": "int8", "block_size": 16, "residual": 16, "retain": Importance(0.5, sinks=4)},
        {"keys": "int8", "values": "int8", "block_size": 16, "residual": 16, "retain": Importance("60kB")},
    ]
)


@st.composite
def forecasts(draw: Any) -> Forecast:
    layers = (CachedLayer(FULL, LayerShape(2, 16, 16)), *draw(st.lists(LAYERS, max_size=3)))
    attention = draw(st.sampled_from(["sdpa", "eager"]))
    body = Anatomy(layers, 4, 64, 256, 1000, draw(st.sampled_from([0, 32])), 128, attention, draw(st.booleans()), None)
    matrices = ((Format.parse("nf4"), (256, 64)),) if draw(st.booleans()) else ()
    steps = Steps(KvPlan(body, torch.bfloat16, draw(SETTINGS)), torch.bfloat16, "cpu", matrices)
    return Forecast(draw(st.integers(0, 10**6)), steps, draw(st.integers(1, 64)))


def check_high_water(forecast: Forecast, tokens: int) -> None:
    """The most of all lengths on the way."""
    plan = forecast.steps.plan
    assert plan.high_water(tokens, 2) == max(plan.nbytes(n, 2) for n in range(tokens + 1))


def check_fit(forecast: Forecast, tokens: int, batch: int, spare: int) -> None:
    """Everything up to the longest context fits, the next token does not; likewise the batch."""
    memory = forecast.peak_nbytes(tokens, batch) + spare
    fit = forecast.fit(memory, tokens, batch)
    longest, most = fit.longest_context, fit.largest_batch
    assert longest is None or longest >= tokens
    assert most is None or most >= batch
    for near in range(max(1, (longest or 2**30) - 40), (longest or 2**30) + 1):
        assert forecast.peak_nbytes(near, batch) <= memory
    if longest is not None:
        assert forecast.peak_nbytes(longest + 1, batch) > memory
    if most is not None:
        assert forecast.peak_nbytes(tokens, most) <= memory < forecast.peak_nbytes(tokens, most + 1)


@given(forecasts(), st.integers(1, 300))
def test_the_high_water_is_the_most_of_all_lengths(forecast: Forecast, tokens: int) -> None:
    check_high_water(forecast, tokens)


@given(forecasts(), st.integers(1, 300), st.integers(1, 5))
def test_peaks_never_fall(forecast: Forecast, tokens: int, batch: int) -> None:
    peak = forecast.peak_nbytes(tokens, batch)
    assert peak <= forecast.peak_nbytes(tokens + 1, batch) and peak <= forecast.peak_nbytes(tokens, batch + 1)


@given(forecasts(), st.integers(1, 2000), st.integers(1, 5), st.integers(0, 10**6))
def test_what_fits_fits_exactly(forecast: Forecast, tokens: int, batch: int, spare: int) -> None:
    check_fit(forecast, tokens, batch, spare)


def test_a_fit_that_ignores_the_way_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the law: the bytes at the end of the way for the most on it."""
    body = Anatomy((CachedLayer(FULL, LayerShape(2, 16, 16)),), 4, 64, 256, 1000, 0, 128, "sdpa", True, None)
    settings = {"keys": "int8", "values": "int8", "block_size": 64, "residual": 8}
    forecast = Forecast(0, Steps(KvPlan(body, torch.bfloat16, settings), torch.bfloat16, "cpu", ()), 8)
    check_high_water(forecast, 80)
    monkeypatch.setattr(KvPlan, "high_water", KvPlan.nbytes)
    assert fails(lambda: check_high_water(forecast, 80))
    assert any(fails(lambda n=n: check_fit(forecast, n, 1, 0)) for n in range(60, 72))  # type: ignore[misc]


def test_nothing_fits_a_memory_below_the_weights() -> None:
    result = footprint(tiny("llama"), context=100, memory=1000)
    assert result.fit is not None and (result.fit.longest_context, result.fit.largest_batch) == (0, 0)


def test_a_bounded_cache_fits_any_context() -> None:
    model = tiny("llama")
    settings: dict[str, Any] = {"keys": "exact", "values": "exact", "retain": Window(128, sinks=4)}
    result = footprint(model, context=100, memory="1GB", chunk=16, **settings)
    assert result.fit is not None and result.fit.longest_context is None and "any context" in str(result)


def test_the_report_and_its_fit_agree() -> None:
    model = tiny("gemma3")
    memory = 1_000_000
    fit = footprint(model, context=64, batch=2, memory=memory, keys="int8", values="int8").fit
    assert fit is not None and fit.longest_context and fit.largest_batch
    for context, batch in ((fit.longest_context, 2), (64, fit.largest_batch)):
        within = footprint(model, context=context, batch=batch, keys="int8", values="int8").peak_nbytes
        assert within is not None and within <= memory
    beyond = footprint(model, context=fit.longest_context + 1, batch=2, keys="int8", values="int8").peak_nbytes
    assert beyond is not None and beyond > memory


@pytest.mark.parametrize("options", [{"context": 0}, {"batch": 0}, {"chunk": -1}, {"context": 5, "memory": "big"}])
def test_sizes_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(QkvError):
        footprint(tiny("llama"), **options)
    with pytest.raises(QkvError, match="context"):
        footprint(tiny("llama"), memory="1GB")


def test_the_parts_of_a_step_are_told() -> None:
    result = footprint(tiny("llama"), context=100, batch=2, chunk=50)
    step = result.workspace
    assert step is not None and step.chunk == 50
    assert step.nbytes == max(step.attention_nbytes, step.products_nbytes, step.logits_nbytes)
    assert result.peak_nbytes == result.total_nbytes + step.nbytes
    assert step.logits_nbytes == 2 * 64 * (4 + 4)
    assert replace(result, workspace=None).peak_nbytes is None
    values = result.to_dict()
    assert values["schema_version"] == 1 and values["workspace"]["nbytes"] == step.nbytes
