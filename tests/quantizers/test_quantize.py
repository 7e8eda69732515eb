from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.errors import QkvError
from qkv.quantizers import grouping
from qkv.quantizers.format import FORMATS, Format
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import MATRIX, SOURCE_DTYPES
from tests.laws import (
    KINDS,
    check_error_bound,
    check_fixed_point,
    check_groups_apart,
    check_stored_as_said,
    sample,
)

SHAPES = [(3, 100), (2, 65), (1, 1), (5, 7), (64,), (2, 3, 33), (4, 128), (1, 1040)]
THREE = ("int8", "int8:asym", "nf4")


@pytest.mark.parametrize("text", MATRIX)
@settings(max_examples=15)
@given(kind=st.sampled_from(KINDS), shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**31))
def test_every_element_is_within_half_a_step(text: str, kind: str, shape: tuple[int, ...], seed: int) -> None:
    format = Format.parse(text)
    x = sample(kind, shape, seed)
    check_error_bound(x, format)
    if not format.double_quant:
        check_fixed_point(x, format)


@settings(max_examples=200)
@given(block=st.sampled_from(["g16", "g64", "g33", "row"]), seed=st.integers(0, 2**31))
def test_nf4_is_a_fixed_point_under_double_quantization(block: str, seed: int) -> None:
    check_fixed_point(sample("normal", (6, 300), seed), Format.parse(f"nf4:{block}:double"))


def test_double_quantization_turns_no_sign() -> None:
    x = sample("normal", (2, 99), 0)
    x[0, 0] = 1e4
    assert bool((quantize_tensor(x, "nf4:g33:double").dequantize() * x >= 0).all())


@pytest.mark.parametrize("text", ["int8:double", "int4:double", "nf4:double", "int8:asym:double", "int4:asym:double"])
def test_huge_groups_stay_finite_under_double_quantization(text: str) -> None:
    x = torch.full((1, 64 * 256), torch.finfo(torch.float32).max)
    x[0, :64] = 0
    assert torch.isfinite(quantize_tensor(x, text).dequantize()).all()


@pytest.mark.parametrize("text", [*FORMATS, "int8:tensor", "nf4:row", "int4:g16:asym:double"])
@pytest.mark.parametrize("dtype", SOURCE_DTYPES, ids=str)
def test_a_dtype_gives_what_its_float32_value_gives(text: str, dtype: torch.dtype) -> None:
    """compressed-tensors#536, ComfyUI_bitsandbytes_NF4 PR#21: float8 has no abs, min, max; bitsandbytes refuses it."""
    x = sample("normal", (4, 100), 3).to(dtype)
    weight, plain = quantize_tensor(x, text), quantize_tensor(x.float(), text)
    assert weight.dtype == dtype and weight.dequantize().dtype == dtype
    for part, other in zip(weight.state().values(), plain.state().values(), strict=True):
        assert torch.equal(part, other)
    check_stored_as_said(x, Format.parse(text))


@pytest.mark.parametrize("text", [*THREE, "int4:asym"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_right(text: str, dtype: torch.dtype) -> None:
    """All finite bit patterns, each once in a group of its own kind and once among the others."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[torch.isfinite(numbers)].sort().values
    rows = numbers[: len(numbers) // 64 * 64].reshape(-1, 64)
    for x in (rows, rows.T.contiguous(), numbers[:, None]):
        check_error_bound(x.float(), Format.parse(text))


def test_bf16_weights_of_any_size_keep_their_quality() -> None:
    """pytorch/ao PR#4534: scales clamped to 2**-7 ruined small weights; torchao's own bar is 40 dB for int8."""
    for std in (0.02, 1e-3, 1e-5):
        for dtype in (torch.bfloat16, torch.float32):
            x = (sample("normal", (64, 512), 0) * std).to(dtype)
            for text, limit in (("int8", 40), ("int8:asym", 40), ("nf4", 20)):
                error = (x.double() - quantize_tensor(x, text).dequantize().double()).pow(2).sum()
                assert float(10 * torch.log10(x.double().pow(2).sum() / error)) >= limit


@pytest.mark.parametrize("text", THREE)
@pytest.mark.parametrize("shape", [(16, 100), (8, 4304), (3, 65), (5, 7), (1, 1), (7, 9), (1, 63), (3, 33)])
def test_a_ragged_last_group_is_as_good_as_any(text: str, shape: tuple[int, int]) -> None:
    """mlx#1033 (4304 % 64), bitsandbytes PR#1884 (garbage tail), vllm-ascend PR#9159 (floor drops a group)."""
    x = sample("normal", shape, 1)
    x[..., -1] *= 3
    x[-1, -1] = 9.0  # odd element counts lose or shift the last one
    check_error_bound(x, Format.parse(text))
    assert abs(float(quantize_tensor(x, text).dequantize()[-1, -1]) - 9) < 0.1


@pytest.mark.parametrize("text", THREE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_zero_group_comes_back_zero(text: str, dtype: torch.dtype) -> None:
    """slime PR#2256 (49,152 NaNs from all-zero blocks), llama.cpp PR#20460, BitNet PR#123."""
    x = sample("normal", (4, 256), 2).to(dtype)
    holes = x.clone()
    holes[1], holes[2, 64:128] = 0, 0
    got, full = quantize_tensor(holes, text).dequantize(), quantize_tensor(x, text).dequantize()
    assert torch.isfinite(got).all() and not got[1].any() and not got[2, 64:128].any()
    assert torch.equal(got[0], full[0]) and torch.equal(got[2, :64], full[2, :64])
    assert not quantize_tensor(torch.zeros(2, 64, dtype=dtype), text).dequantize().any()


@pytest.mark.parametrize("text", [*THREE, "int4", "int8:row", "int4:g7:asym", "nf4:g33"])
@given(row=st.integers(0, 3), column=st.integers(0, 255), seed=st.integers(0, 99))
def test_an_outlier_stays_in_its_group(text: str, row: int, column: int, seed: int) -> None:
    """bitsandbytes 0.50.2: 63 of 64 neighbours become 0; no other group may change."""
    check_groups_apart(sample("normal", (4, 256), seed), Format.parse(text), row, column)


@pytest.mark.parametrize("text", ["int8:asym", "int8:asym:row", "int8:asym:tensor"])
@pytest.mark.parametrize("factor", [1.0, -1.0, 1e-3, -1e30])
def test_groups_of_one_sign_keep_their_range(text: str, factor: float) -> None:
    """nncf PR#4074: [-22..-15] came back as [-7]*8, the zero point (804) having been clamped. The range holds 0."""
    for x in (torch.arange(-22.0, -14.0).repeat(2, 8) * factor, torch.linspace(100, 101, 64)[None] * factor):
        weight = quantize_tensor(x, text)
        assert float((weight.dequantize() - x).abs().max()) <= float(x.abs().max()) / 255 * 0.501
        assert weight.zero is not None and set(weight.zero.flatten().tolist()) <= {0, 255}


@pytest.mark.parametrize("text", [*FORMATS, "int4:tensor"])
def test_strides_do_not_matter_and_the_input_is_left_alone(text: str) -> None:
    """bitsandbytes#1342, #1690, #1995 (CPU), burn#4491: wrong results from non-contiguous tensors."""
    base = sample("normal", (64, 96), 5)
    stack = sample("normal", (4, 8, 32), 6)
    views = [base.t(), base[::2], base[:, ::2], base[:, 3:67], stack.transpose(0, 1), base[:1, :64].expand(4, 64)]
    for view in [*views, base[1:].t(), stack.permute(2, 0, 1), base[3]]:
        before = view.clone()
        strided, plain = quantize_tensor(view, text), quantize_tensor(view.contiguous(), text)
        for part, other in zip(strided.state().values(), plain.state().values(), strict=True):
            assert torch.equal(part, other)
        assert torch.equal(view, before)


@pytest.mark.parametrize("text", MATRIX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_pads_a_short_group_is_zeros(text: str, dtype: torch.dtype) -> None:
    """Files are the same byte for byte each time, and a kernel may multiply a whole group."""
    format = Format.parse(text)
    if format.group_size in ("row", "tensor", 1):
        return
    size = int(format.group_size)
    for shape in ((17, size + 3), (3, 2 * size - 1), (5, 3 * size + 1)):
        x = sample("normal", shape, 4).to(dtype)
        whole = torch.nn.functional.pad(x, (0, -shape[1] % size))
        ragged, padded = quantize_tensor(x, text), quantize_tensor(whole, text)
        assert torch.equal(ragged.codes, padded.codes) and torch.equal(ragged.scale, padded.scale)


def test_a_zero_point_half_way_between_codes_is_stable() -> None:
    """Without the shrunk step of integer.py, -0.5 ... 254.5 would lose an end, and its codes change next time."""
    for text, top in (("int8:asym", 254.5), ("int4:asym", 14.5)):
        for low in (-0.5, -1.5, -top + 0.5, -top):
            check_fixed_point(torch.tensor([[low, low / 3, (top - 0.5) / 7, top + 0.5 + low]]), Format.parse(text))


def test_gradients_do_not_flow_into_what_is_stored() -> None:
    weight = quantize_tensor(torch.randn(4, 64, requires_grad=True), "int8:asym:double")
    assert not any(tensor.requires_grad for tensor in weight.state().values())


@pytest.mark.parametrize("text", [*THREE, "int8:tensor", "int4:double"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2], ids=str)
def test_a_number_that_is_none_is_named_with_its_place(text: str, bad: float, dtype: torch.dtype) -> None:
    """llama.cpp#6841: a hard error beats a broken model; in bitsandbytes one NaN makes its block of 64 NaN."""
    x = sample("normal", (4, 128), 7)
    x[2, 77], x[3, 1] = bad, bad
    with pytest.raises(QkvError) as caught:
        quantize_tensor(x.to(dtype), text, name="model.layers.0.mlp.up_proj")
    message = str(caught.value)
    assert all(word in message for word in ("model.layers.0.mlp.up_proj", "2 values", "row 2", "column 77"))
    assert "\n" not in message


def test_a_float64_beyond_float32_is_named() -> None:
    x = torch.zeros(2, 64, dtype=torch.float64)
    x[1, 3] = 1e300
    with pytest.raises(QkvError, match=r"row 1, column 3 \(1e\+300, beyond float32's range\)"):
        quantize_tensor(x)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.int32], ids=str
)
def test_what_is_no_float_is_refused_by_name(dtype: torch.dtype) -> None:  # bitsandbytes#1525: uint8 source
    with pytest.raises(QkvError, match=str(dtype).removeprefix("torch.")):
        quantize_tensor(torch.ones(4, 64).to(dtype))


def test_what_has_no_values_is_refused() -> None:
    with pytest.raises(QkvError, match="meta"):
        quantize_tensor(torch.empty(4, 64, device="meta"), name="w")
    with pytest.raises(QkvError, match="0-D"):
        quantize_tensor(torch.tensor(1.0))


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0,), (0, 0), (2, 0, 3), (2, 3, 0)])
def test_empty_in_empty_out(text: str, shape: tuple[int, ...]) -> None:  # bitsandbytes#1071
    back = quantize_tensor(torch.zeros(shape, dtype=torch.bfloat16), text).dequantize()
    assert back.shape == shape and back.dtype == torch.bfloat16


@pytest.mark.parametrize("text", FORMATS)
def test_one_element(text: str) -> None:
    for value in (3.5, -3.5, 0.0, 1e-44, -3e38):
        for shape in ((1,), (1, 1), (1, 1, 1)):
            x = torch.full(shape, value)
            check_error_bound(x, Format.parse(text))


def test_a_group_larger_than_the_row_is_the_row() -> None:
    x = sample("normal", (4, 96), 8)
    for text in ("int8", "int8:asym", "nf4"):
        parts = [quantize_tensor(x, replace(Format.parse(text), group_size=size)) for size in (4096, "row", 96)]
        assert all(torch.equal(parts[0].codes, p.codes) and torch.equal(parts[0].scale, p.scale) for p in parts)


def test_work_in_pieces_is_work_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample("magnitudes", (37, 130), 9)
    whole = {text: quantize_tensor(x, text) for text in (*FORMATS, "int8:tensor", "nf4:tensor")}
    values = {text: weight.dequantize() for text, weight in whole.items()}
    for pieces in (1, 131, 400):
        monkeypatch.setattr(grouping, "CHUNK_ELEMENTS", pieces)
        for text, weight in whole.items():
            again = quantize_tensor(x, text)
            for part, other in zip(weight.state().values(), again.state().values(), strict=True):
                assert torch.equal(part, other)
            assert torch.equal(values[text], again.dequantize())


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """bitsandbytes#1782, #1785, #2067, unsloth PR#6884: needs about 20 GB and a minute or two."""
    rows = 2**31 // 4096 + 2
    x: Tensor = torch.zeros(rows, 4096, dtype=torch.float16)
    x[-2:] = sample("normal", (2, 4096), 10).half()
    weight = quantize_tensor(x, "nf4")
    tail = quantize_tensor(x[-2:], "nf4")
    assert torch.equal(weight.codes[-2:], tail.codes) and torch.equal(weight.scale[-2:], tail.scale)
    back = weight.dequantize()
    assert back.shape == x.shape and not back[:4].any() and torch.equal(back[-2:], tail.dequantize())
