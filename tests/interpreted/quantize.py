"""Quantizing by Triton under its interpreter; tests/test_triton.py runs this in its own process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.quantizers.format import Format
from qkv.quantizers.kernels import native, triton_quantize
from qkv.quantizers.kernels.triton_live import interpreted
from qkv.quantizers.quantize import quantize_tensor

assert interpreted()

TEXTS = ("int8", "int8:asym", "int4", "int4:asym", "nf4", "int8:g7", "int4:g7:asym", "nf4:g50", "nf4:row", "int8:row")


@pytest.fixture(autouse=True)
def formulas_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """``quantize_tensor`` is the reference here: plain torch."""
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_reason", "not here")
    monkeypatch.setattr("qkv.quantizers.quantize._on_gpu", lambda rows, format: None)


def check(x: Tensor, text: str) -> None:
    want, format = quantize_tensor(x, text), Format.parse(text)
    assert triton_quantize.refuses(x, format) is None
    found = triton_quantize.quantize(x, format)
    assert found is not None
    for got, expected in zip(found, (want.codes, want.scale, want.zero), strict=True):
        assert (got is None and expected is None) or (got is not None and expected is not None)
        assert got is None or expected is None or (got.dtype == expected.dtype and torch.equal(got, expected))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_scales_and_zero_points_are_the_references_bit_for_bit(text: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(torch.randn(5, 100).to(dtype), text)


@settings(max_examples=25)
@given(st.integers(0, 99), st.sampled_from(TEXTS), st.integers(1, 9), st.integers(1, 150), st.floats(1e-3, 1e3))
def test_any_values(seed: int, text: str, rows: int, columns: int, size: float) -> None:
    """Groups of zeros, of one sign, of one value, and outliers among them."""
    torch.manual_seed(seed)
    x = torch.randn(rows, columns) * size
    x[0] = 0
    x[-1] = x[-1].abs()
    x[:, 0] *= 1e4
    check(x, text)


@pytest.mark.parametrize("text", ["int8", "int8:asym", "int4", "nf4"])
def test_the_smallest_and_the_largest_values(text: str) -> None:
    x = torch.tensor([[1e-45, -3e-45, 2e-44], [1e-38, -2e-39, 3e-39], [3e38, -3.4e38, 1.0], [0.0, -0.0, 0.0]])
    check(x, text)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("text", ["int8", "int4:asym", "nf4"])
def test_what_is_not_finite_is_noticed(text: str, value: float) -> None:
    x = torch.ones(3, 70)
    x[1, 66] = value
    assert triton_quantize.quantize(x, Format.parse(text)) is None


def test_what_it_does_not_serve_is_refused() -> None:
    for text in ("int8:tensor", "int8:double"):
        assert triton_quantize.refuses(torch.ones(2, 64), Format.parse(text))
    assert triton_quantize.refuses(torch.ones(2, 64).double(), Format("nf4"))
    assert triton_quantize.refuses(torch.ones(2, 64), Format("nf4:double".split(":")[0], double_quant=True)) is None
