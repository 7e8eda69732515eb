from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.quantizers.format import Format
from qkv.quantizers.interleave import in_order, interleaved, refuses
from qkv.quantizers.kernels import native
from qkv.quantizers.kernels.ready import ReadyWeight
from qkv.quantizers.quantize import quantize_tensor


def test_the_order_of_a_strip() -> None:
    """Of sixteen rows, four bytes each; a scale each."""
    codes = torch.arange(32 * 2 * 8, dtype=torch.int16).to(torch.uint8).reshape(32, 2, 8)
    turned = interleaved(codes).reshape(2, 4, 16, 4)
    rows = codes.reshape(32, 16)
    for strip in range(2):
        for unit in range(4):
            for row in range(16):
                assert torch.equal(turned[strip, unit, row], rows[16 * strip + row, 4 * unit : 4 * unit + 4])
    scale = torch.arange(64.0).reshape(32, 2)
    assert torch.equal(interleaved(scale).reshape(2, 2, 16), scale.reshape(2, 16, 2).transpose(1, 2))


@given(strips=st.integers(1, 3), groups=st.integers(1, 5), units=st.integers(1, 5))
def test_it_is_undone(strips: int, groups: int, units: int) -> None:
    for shape, dtype in (((16 * strips, groups, 4 * units), torch.uint8), ((16 * strips, groups), torch.float32)):
        tensor = torch.randint(0, 256, shape).to(dtype)
        turned = interleaved(tensor)
        assert turned.shape == tensor.shape and turned.dtype == dtype
        assert torch.equal(in_order(turned), tensor)


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        ("nf4", (17, 64), "multiple of 16, and has 17"),
        ("nf4", (0, 64), "has 0"),
        ("nf4:g40", (16, 80), "groups of 40"),
        ("int8:row", (16, 66), "groups of 66"),
        ("int8:tensor", (16, 64), "one for the tensor"),
        ("nf4", (2, 16, 64), "multiple of 16"),
    ],
)
def test_what_cannot_be_interleaved_is_said(text: str, shape: tuple[int, ...], words: str) -> None:
    reason = refuses(Format.parse(text), shape)
    assert reason is not None and words in reason


@pytest.mark.skipif(native.unavailable() is not None or native.level() != "avx512", reason="needs AVX-512")
@pytest.mark.parametrize("columns", [64, 576, 1000, 1536])
@pytest.mark.parametrize(
    "text",
    ["nf4", "nf4:g16", "nf4:g48", "nf4:row", "int4:asym", "int4:g128", "int8", "int8:asym:g32", "int8:g16", "int8:row"],
)
def test_products_are_those_of_the_stored_order(text: str, columns: int) -> None:
    """Within the bounds of the fast mode; a row gives the same whatever the number of rows; NaN stays in its row."""
    format = Format.parse(text)
    for rows in (16, 48, 112):
        if refuses(format, (rows, columns)) is not None:
            continue
        torch.manual_seed(rows)
        weight = quantize_tensor(torch.randn(rows, columns), text)
        codes, scale = interleaved(weight.codes), interleaved(weight.scale)
        zero = None if weight.zero is None else interleaved(weight.zero)
        size = format.group_length(columns)
        ready = ReadyWeight(
            codes, scale, zero, kind=format.name, in_features=columns, group_size=size, interleaved=True
        )
        x, bias = torch.randn(37, columns).bfloat16(), torch.randn(rows)
        exact = weight.dequantize(torch.float64)
        want, size_of = x.double() @ exact.T + bias.double(), x.double().abs() @ exact.abs().T
        found = ready.linear(x, bias)
        bound = 3e-3 if format.name == "nf4" else 1e-4
        assert ((found.double() - want).abs() <= bound * size_of + want.abs() / 256 + 1e-6).all()
        for count in (1, 2, 5, 8, 9, 17):
            assert torch.equal(ready.linear(x[:count], bias), found[:count])
        x[3, 5] = float("nan")
        spoilt = ready.linear(x, bias)
        assert spoilt[3].isnan().all() and torch.equal(spoilt[4:], found[4:])
