from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.errors import QkvError
from qkv.quantizers import calibration, grouping
from qkv.quantizers.calibration import output_error
from qkv.quantizers.format import FORMATS, Format
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import MATRIX
from tests.laws import check_nearest_codes, check_searched_scales, sample, weighted_errors

SHAPES = [(3, 100), (2, 65), (1, 1), (64,), (3, 5, 33), (4, 128)]
KINDS = ("normal", "one sign", "constant", "some zero groups", "small grid", "spike")
WEIGHTS = ("even", "zero", "one", "wild")


def importances(kind: str, shape: tuple[int, ...], seed: int, stacked: bool) -> Tensor:
    """Mean squares of inputs, of a kind: all the same, none, one column alone, or over many magnitudes."""
    generator = torch.Generator().manual_seed(seed + 1)
    size = (shape[0], shape[-1]) if stacked and len(shape) == 3 else (shape[-1],)
    if kind == "one":
        result = torch.zeros(size)
        result[..., seed % shape[-1]] = 3.0
        return result
    if kind == "wild":
        return torch.randn(size, generator=generator).mul(4).exp()
    return torch.full(size, 0.0 if kind == "zero" else 0.7)


@pytest.mark.parametrize("text", MATRIX)
@settings(max_examples=8)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from(SHAPES),
    weights=st.sampled_from(WEIGHTS),
    stacked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_no_group_weighs_more_than_before(
    text: str, kind: str, shape: tuple[int, ...], weights: str, stacked: bool, seed: int
) -> None:
    format, x = Format.parse(text), sample(kind, shape, seed)
    importance = importances(weights, shape, seed, stacked and format.group_size != "tensor")
    check_searched_scales(x, format, importance)


@pytest.mark.parametrize("text", [*FORMATS, "int4:g16:double", "int8:tensor"])
def test_codes_are_the_nearest_and_the_layout_is_the_same(text: str) -> None:
    format, x = Format.parse(text), sample("normal", (6, 300), 3)
    importance = importances("wild", (6, 300), 3, False)
    check_nearest_codes(x, format, importance)
    weight = quantize_tensor(x, format, importance=importance)
    stored = {suffix: (tuple(t.shape), t.dtype) for suffix, t in weight.state("").items()}
    assert stored == format.layout((6, 300)) and weight.nbytes == format.stored_nbytes((6, 300))


@pytest.mark.parametrize("text", FORMATS)
def test_what_weighs_nothing_or_is_exact_already_stays_as_it_was(text: str) -> None:
    x = sample("normal", (5, 192), 0)
    plain = quantize_tensor(x, text)
    ignored = quantize_tensor(x, text, importance=torch.zeros(192))
    assert torch.equal(plain.dequantize(), ignored.dequantize())
    if plain.format.double_quant:
        return
    exact = plain.dequantize()
    again = quantize_tensor(exact, text, importance=importances("wild", (5, 192), 1, False))
    assert float((again.dequantize() - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


@pytest.mark.parametrize("text", ["nf4", "int4", "int4:asym"])
def test_the_search_is_worth_it(text: str) -> None:
    """llama.cpp's importance matrices: columns that meet large inputs are kept closer."""
    x, importance = sample("normal", (64, 256), 0), importances("wild", (1, 256), 0, False)
    before, after = (weighted_errors(x, quantize_tensor(x, text, importance=i), importance) for i in (None, importance))
    assert float(after.sum()) < 0.5 * float(before.sum())


@pytest.mark.parametrize("text", ["nf4", "int8:asym", "int4:row", "int4:tensor", "nf4:double"])
def test_it_is_the_same_in_any_chunks_and_each_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, importance = sample("normal", (3, 8, 96), 5), importances("wild", (3, 8, 96), 5, text != "int4:tensor")
    once = quantize_tensor(x, text, importance=importance).dequantize()
    assert torch.equal(once, quantize_tensor(x, text, importance=importance).dequantize())
    for module in (grouping, calibration):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 200)
    again = quantize_tensor(x, text, importance=importance).dequantize()
    assert torch.equal(once, again) or text.endswith(("tensor", "double"))


def test_each_expert_is_weighed_by_its_own_inputs() -> None:
    x, importance = sample("normal", (3, 8, 96), 7), importances("wild", (3, 8, 96), 7, True)
    stack = quantize_tensor(x, "nf4", importance=importance)
    for expert in range(3):
        alone = quantize_tensor(x[expert], "nf4", importance=importance[expert])
        assert torch.equal(stack[expert].dequantize(), alone.dequantize())


def test_the_error_of_each_output() -> None:
    x, importance = sample("normal", (3, 8, 96), 2), importances("wild", (3, 8, 96), 2, True)
    weight = quantize_tensor(x, "int4")
    want = ((x.double() - weight.dequantize().double()).square() * importance.double()[:, None]).sum(-1)
    assert torch.allclose(output_error(x, weight, importance).double(), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("importance", "text", "match"),
    [
        (torch.ones(9), "nf4", r"shape \[9\]; its weight needs \[10\] or \[2, 10\]"),
        (torch.ones(3, 10), "nf4", r"shape \[3, 10\]"),
        (torch.ones(2, 10), "int8:tensor", r"needs \[10\]"),
        (-torch.ones(10), "nf4", "negative or not finite"),
        (torch.full((10,), float("nan")), "nf4", "negative or not finite"),
    ],
)
def test_an_importance_that_does_not_fit_is_refused(importance: Tensor, text: str, match: str) -> None:
    with pytest.raises(QkvError, match=match):
        quantize_tensor(torch.ones(2, 4, 10), text, importance=importance, name="w")
