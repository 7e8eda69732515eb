from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.quantizers.double_quant import dynamic_map
from qkv.quantizers.format import NESTED_BLOCK, Format
from qkv.quantizers.nf4 import LEVELS, ZERO_CODE
from qkv.quantizers.quantize import quantize_tensor
from tests.laws import KINDS, check_like_bitsandbytes, sample

bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
MEAN_ERRORS = {
    32: (0.067746, 0.000069, 0.189726, 0.000304),
    64: (0.072798, 0.000074, 0.203339, 0.000340),
    128: (0.076831, 0.000091, 0.215237, 0.000391),
    256: (0.080337, 0.000102, 0.226105, 0.000398),
    512: (0.083547, 0.000143, 0.236079, 0.000544),
    1024: (0.086610, 0.000187, 0.245370, 0.000600),
}
"""Mean absolute and mean relative error of N(0, 1) by block size, each with its sigma: bitsandbytes 0.50
tests/test_functional.py::test_4bit_quant."""


def test_the_levels_are_the_published_ones() -> None:
    """bitsandbytes functional.get_4bit_type("nf4"); a level is exactly 0, unlike in the tutorials' tables."""
    assert torch.equal(torch.tensor(LEVELS), bnb.get_4bit_type("nf4", device="cpu"))
    assert LEVELS[ZERO_CODE] == 0


@pytest.mark.parametrize("block", [64, 128, 256, 512, 1024])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(kind=st.sampled_from([kind for kind in KINDS if kind != "denormal"]), seed=st.integers(0, 2**31))
def test_codes_absmax_and_values_are_those_of_bitsandbytes(
    block: int, dtype: torch.dtype, kind: str, seed: int
) -> None:
    x = sample(kind, (3, 1024), seed).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if dtype == torch.float32 and kind == "magnitudes":
        x = x.sign() * x.abs().clamp(min=1e-35)  # below 1e-38 bitsandbytes no longer scales
    check_like_bitsandbytes(x, block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_coded_as_bitsandbytes_codes_it(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[torch.isfinite(numbers) & ((numbers == 0) | (numbers.abs() > 1e-37))].sort().values
    check_like_bitsandbytes(numbers[: len(numbers) // 512 * 512].reshape(-1, 512), 64)
    spread = numbers[numbers.abs() <= 1][:, None].repeat(1, 64).contiguous()
    spread[:, 0] = 1  # every number in [-1, 1] against an absmax of 1
    check_like_bitsandbytes(spread, 64)


def test_the_dynamic_map_is_that_of_bitsandbytes() -> None:
    assert torch.equal(dynamic_map(CPU), bnb.create_dynamic_map())


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_nested_codes_are_those_of_bitsandbytes_but_for_rounding(rows: int) -> None:
    """facts/weights.md 3a: its CPU quantizer rounds through a table, so about 0.1 % differ, by one step."""
    x = sample("normal", (rows, 1024), rows)
    _, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    weight = quantize_tensor(x, "nf4:double")
    assert weight.scale_absmax is not None and weight.scale_offset is not None
    assert weight.scale_absmax.shape == state.state2.absmax.shape
    assert torch.allclose(weight.scale_offset, state.offset, rtol=1e-6)
    assert torch.allclose(weight.scale_absmax, state.state2.absmax, rtol=1e-5)
    steps = (weight.scale.reshape(-1).int() - state.absmax.int()).abs()
    assert int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 0.01
    assert weight.scale_absmax.numel() == -(-rows * 16 // NESTED_BLOCK)


@pytest.mark.parametrize("block", MEAN_ERRORS)
def test_mean_errors_are_those_of_bitsandbytes(block: int) -> None:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(11))
    for dtype in FLOATS if block == 64 else FLOATS[:1]:
        value = x.to(dtype)
        error = (value - quantize_tensor(value, Format("nf4", block)).dequantize()).abs().float()
        relative = (error / (value.abs().float() + 1e-8)).mean()
        mean, sigma, relative_mean, relative_sigma = MEAN_ERRORS[block]
        assert abs(float(error.mean()) / mean - 1) < 0.01 and float(error.mean()) < mean + 7 * sigma
        assert abs(float(relative) / relative_mean - 1) < 0.01 or float(relative) < relative_mean
        assert float(relative) < relative_mean + 7 * relative_sigma


@pytest.mark.parametrize("block", [32, 64, 128])
def test_double_quantization_stays_within_the_peers_limits(block: int) -> None:
    """bitsandbytes test_4bit_compressed_stats: mean absolute error below 0.11, relative below 0.28."""
    x = sample("normal", (1024, 1024), 12)
    error = (x - quantize_tensor(x, Format("nf4", block, double_quant=True)).dequantize()).abs()
    assert float(error.mean()) < 0.11 and float((error / (x.abs() + 1e-8)).mean()) < 0.28
