"""The native kernels against a float64 reference written here, at every dispatch level the processor has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.quantizers.kernels import native
from qkv.quantizers.kernels.ready import ReadyWeight
from qkv.quantizers.nf4 import LEVELS as NF4_LEVELS
from qkv.quantizers.quantize import quantize_tensor
from tests.quantizers.kernels.sanitize import run_sanitized

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

KINDS = ("int8", "int8:asym", "int4", "int4:asym", "nf4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUTPUT_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""Rounding of the result itself, relative."""
EXACT = 1e-6
"""Tolerance of float32 products, relative to the sum of the magnitudes of all products."""
FAST = {
    ("avx512", "nf4"): 2e-3,  # levels in bfloat16
    ("avx512", "int4"): 1e-6,
    ("avx512", "int8"): 4e-5,  # x in 16 bits, from two to twelve rows
    ("avx2", "nf4"): 4e-4,  # levels in 14 bits, x in 16
    ("avx2", "int4"): 4e-5,
    ("avx2", "int8"): 4e-5,
    ("portable", "nf4"): 1e-6,
    ("portable", "int4"): 1e-6,
    ("portable", "int8"): 1e-6,
}


@dataclass
class Weight:
    """Random bytes as codes, the padding included, and what they mean in float64."""

    kind: str
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    in_features: int
    group_size: int

    @property
    def name(self) -> str:
        return self.kind.removesuffix(":asym")

    @property
    def sizes(self) -> dict[str, Any]:
        return {"kind": self.name, "in_features": self.in_features, "group_size": self.group_size}

    def linear(self, x: Tensor, bias: Tensor | None = None, exact: bool = False) -> Tensor:
        return ReadyWeight(self.codes, self.scale, self.zero, **self.sizes).linear(x, bias, exact=exact)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return native.dequantize(self.codes, self.scale, self.zero, dtype=dtype, **self.sizes)

    def _levels(self) -> Tensor:
        """``[out, groups, group]``: float32 values before the scale."""
        if self.name == "int8":
            values = self.codes.to(torch.float32)
            return values if self.zero is None else values - self.zero[..., None]
        nibbles = torch.stack((self.codes >> 4, self.codes & 15), dim=-1).flatten(-2)[..., : self.group_size]
        if self.name == "nf4":
            return torch.tensor(NF4_LEVELS, dtype=torch.float32)[nibbles.long()]
        return nibbles.to(torch.float32) - (8 if self.zero is None else self.zero[..., None])

    def float32(self) -> Tensor:
        """``[out, in]``, one rounding."""
        return (self._levels() * self.scale[..., None]).flatten(1)[:, : self.in_features]

    def float64(self) -> Tensor:
        values = self._levels().double() * self.scale[..., None].double()
        return values.flatten(1)[:, : self.in_features]


def make_weight(kind: str, out_features: int, in_features: int, group_size: int, seed: int = 0) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-in_features // group_size)
    length = group_size if kind.startswith("int8") else -(-group_size // 2)
    shape = (out_features, groups, length)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if kind == "int8":
        codes = codes.view(torch.int8)
    scale = torch.rand(shape[:2], generator=generator) + 0.01
    zero = None
    if kind.endswith(":asym"):
        top = 256 if kind.startswith("int8") else 16
        zero = torch.randint(0, top, shape[:2], dtype=torch.uint8, generator=generator)
    return Weight(kind, codes, scale, zero, in_features, group_size)


def make_x(rows: int, in_features: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_product(weight: Weight, x: Tensor, y: Tensor, bias: Tensor | None, tolerance: float) -> None:
    exact = x.double() @ weight.float64().T
    size = x.double().abs() @ weight.float64().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert y.dtype == x.dtype and y.shape == exact.shape
    limit = tolerance * size + OUTPUT_STEP[x.dtype] * (exact.abs() + tolerance * size) + 1e-30
    worst = ((y.double() - exact).abs() / limit).max().item() if y.numel() else 0.0
    assert worst <= 1, f"{worst:.3g} times the tolerance"


def tolerance_of(level: str, kind: str, dtype: torch.dtype, exact: bool = False) -> float:
    if dtype != torch.bfloat16 or exact:
        return EXACT
    return FAST[level, kind.removesuffix(":asym")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", (16, 32, 48, 64, 80, 128, 192, 576))
def test_products_over_the_matrix(level: str, kind: str, group_size: int) -> None:
    for out_features, in_features in ((1, 16), (7, 100), (67, 576), (130, 640)):
        weight = make_weight(kind, out_features, in_features, min(group_size, -(-in_features // 16) * 16))
        for dtype in DTYPES:
            bias = make_x(1, out_features, dtype, seed=3)[0]
            for rows in (0, 1, 2, 3, 4, 5, 8, 16, 17, 30):
                x = make_x(rows, in_features, dtype)
                for given_bias in (None, bias) if rows in (1, 5) else (bias,):
                    y = weight.linear(x, given_bias)
                    check_product(weight, x, y, given_bias, tolerance_of(level, kind, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_exact_mode_for_bfloat16(level: str, kind: str) -> None:
    weight = make_weight(kind, 33, 320, 64)
    for rows in (1, 4, 9):
        x = make_x(rows, 320, torch.bfloat16)
        check_product(weight, x, weight.linear(x, exact=True), None, EXACT)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(native.LEVELS),
    out_features=st.integers(1, 40),
    in_features=st.integers(1, 400),
    group_size=st.integers(1, 300),
    rows=st.integers(0, 20),
    dtype=st.sampled_from(DTYPES),
    exact=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_of_any_shape(
    kind: str,
    name: str,
    out_features: int,
    in_features: int,
    group_size: int,
    rows: int,
    dtype: torch.dtype,
    exact: bool,
    seed: int,
) -> None:
    before = native.level()
    used = native.set_level(name)
    try:
        weight = make_weight(kind, out_features, in_features, min(group_size, in_features), seed)
        x = make_x(rows, in_features, dtype, seed)
        y = weight.linear(x, exact=exact)
        check_product(weight, x, y, None, tolerance_of(used, kind, dtype, exact))
        assert torch.equal(weight.dequantize(dtype), as_dtype(weight.float32(), dtype))
    finally:
        native.set_level(before)


def as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.clamp(-65504, 65504) if dtype == torch.float16 else values).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_x_gives_the_same_bits_in_any_company(level: str, kind: str) -> None:
    """On AVX-512 in bfloat16, up to one row (8 bits) or eight (4 bits) have kernels of their own."""
    for group_size in (32, 64):
        weight = make_weight(kind, 37, 448, group_size)
        for dtype in DTYPES:
            x = make_x(16, 448, dtype)
            apart = 1 if kind.startswith("int8") else 8
            split = level == "avx512" and dtype == torch.bfloat16
            for low, high in ((1, apart), (apart + 1, 12)) if split else ((1, 16),):
                most = weight.linear(x[:high])
                for rows in range(low, high):
                    assert torch.equal(weight.linear(x[:rows]), most[:rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", (16, 64, 80))
def test_threads_change_no_bit(level: str, kind: str, group_size: int) -> None:
    weight, before = make_weight(kind, 515, 640, group_size), torch.get_num_threads()
    inputs = [make_x(rows, 640, dtype) for dtype in DTYPES for rows in (1, 3, 16, 50)]
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append([weight.linear(x) for x in inputs] + [weight.dequantize(dtype) for dtype in DTYPES])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("kind", ("int8", "nf4"))
def test_non_finite_x_stays_visible(level: str, kind: str, bad: float) -> None:
    weight = make_weight(kind, 9, 192, 64)
    for dtype in DTYPES:
        x = make_x(3, 192, dtype)
        x[1, 70] = bad
        finite = weight.linear(x).isfinite()
        assert finite[0].all() and finite[2].all()
        assert not finite[1].any() or (kind == "nf4" and finite[1].sum() < 9)  # a level may be 0 times infinity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", (1, 5, 16, 31, 64, 100, 257))
def test_dequantize_is_the_reference_bit_for_bit(level: str, kind: str, group_size: int) -> None:
    for out_features, in_features in ((1, 1), (3, 97), (70, 300)):
        weight = make_weight(kind, out_features, in_features, min(group_size, in_features))
        weight.scale[0, 0] = 3e-39  # subnormal values must survive, and large ones must not overflow
        weight.scale[-1, -1] = 1e6
        for dtype in DTYPES:
            assert torch.equal(weight.dequantize(dtype), as_dtype(weight.float32(), dtype))


def test_dequantize_writes_rows_into_a_panel(level: str) -> None:
    weight = make_weight("int4:asym", 50, 96, 32)
    assert weight.zero is not None
    whole, panel = weight.dequantize(torch.bfloat16), torch.zeros(12, 96, dtype=torch.bfloat16)
    native.dequantize(
        weight.codes[20:30],
        weight.scale[20:30],
        weight.zero[20:30],
        kind="int4",
        in_features=96,
        group_size=32,
        dtype=torch.bfloat16,
        out=panel[1:11],
    )
    assert torch.equal(panel[1:11], whole[20:30]) and not panel[0].any() and not panel[11].any()


def shifted(tensor: Tensor, nbytes: int) -> Tensor:
    """The same values at an address that is no multiple of anything."""
    size = tensor.numel() * tensor.element_size()
    room = torch.empty(size + nbytes + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + nbytes
    moved = room[start : start + size].view(tensor.dtype).view(tensor.shape)
    return moved.copy_(tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_pointers(level: str, kind: str) -> None:
    weight = make_weight(kind, 21, 256, 64)
    aligned = weight.linear(make_x(2, 256, torch.bfloat16))
    values = weight.dequantize(torch.float32)
    weight.codes, weight.scale = shifted(weight.codes, 1), shifted(weight.scale, 4)
    weight.zero = None if weight.zero is None else shifted(weight.zero, 3)
    assert torch.equal(weight.linear(shifted(make_x(2, 256, torch.bfloat16), 2)), aligned)
    assert torch.equal(weight.dequantize(torch.float32), values)


def test_bias_of_another_dtype(level: str) -> None:
    weight, x = make_weight("int8", 12, 64, 64), make_x(2, 64, torch.bfloat16)
    bias = torch.randn(12)
    check_product(weight, x, weight.linear(x, bias), bias, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_is_the_reference_bit_for_bit(level: str, kind: str, dtype: torch.dtype) -> None:
    for group in ("g1", "g7", "g16", "g33", "g64", "row"):
        for size in (1.0, 1e-39, 1e4):
            x = torch.randn(70, 130, generator=torch.Generator().manual_seed(2)) * size
            x[1], x[2], x[3] = 0, x[2].abs(), -x[3].abs()
            x = x.clamp(-6e4, 6e4).to(dtype)
            want = quantize_tensor(x, f"{kind}:{group}")
            found = native.quantize(
                x,
                kind=want.format.name,
                group_size=want.format.group_length(130),
                symmetric=want.format.symmetric,
            )
            assert found is not None
            for mine, theirs in zip(found, (want.codes, want.scale, want.zero), strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or theirs is None or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))


def test_quantize_ties_go_where_the_reference_sends_them(level: str) -> None:
    half_steps = torch.arange(-254, 255).reshape(1, -1) / 2
    table = torch.tensor(NF4_LEVELS)
    midpoints = torch.cat([(table[1:] + table[:-1]) / 2, table]).reshape(1, -1)
    for kind, x in (("int8", half_steps), ("int4", half_steps / 18), ("nf4", midpoints)):
        want = quantize_tensor(x, f"{kind}:row")
        found = native.quantize(x, kind=kind, group_size=x.shape[1])
        assert found is not None and torch.equal(found[0], want.codes)


@pytest.mark.parametrize("kind", ("int8", "int8:asym", "int4", "int4:asym"))
def test_quantize_with_scales_given(level: str, kind: str) -> None:
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(4))
    want = quantize_tensor(x, f"{kind}:double")
    found = native.quantize(
        x,
        kind=want.format.name,
        group_size=64,
        symmetric=want.format.symmetric,
        scale=want.float_scale(),
        zero=want.zero,
    )
    assert found is not None and torch.equal(found[0], want.codes)


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
def test_quantize_says_when_values_are_not_finite(level: str, bad: float) -> None:
    for kind in ("int8", "int4", "nf4"):
        for dtype in DTYPES:
            x = torch.ones(5, 70, dtype=dtype)
            x[3, 69] = bad
            assert native.quantize(x, kind=kind, group_size=32) is None


def test_the_environment_forces_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.level()
    monkeypatch.setenv("QKV_KERNELS", "reference")
    library, reason = native._load()
    assert library is None and "reference" in str(reason)
    monkeypatch.setenv("QKV_KERNELS", "portable")
    native._load()
    assert native.level() == "portable"
    native.set_level(before)


def test_read_adds_up_every_word() -> None:
    words = torch.arange(100_000, dtype=torch.int64)[: 12_500 * 8]
    assert native.read(words) == int(words.sum())


DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "native.h"

int qkv_set_level(int), qkv_linear(const struct qkv_weight *, const void *, const void *, void *, ptrdiff_t, int);
int qkv_quantize(const void *, void *, float *, uint8_t *, ptrdiff_t, ptrdiff_t, ptrdiff_t, int, int, int, int, int);
void qkv_dequantize(
    const void *, const float *, const uint8_t *, void *, ptrdiff_t, ptrdiff_t, ptrdiff_t, int, int, int);
uint64_t qkv_read(const void *, ptrdiff_t, int);

static unsigned state = 1;
static unsigned draw(unsigned below) { return (state = state * 1664525u + 1013904223u) / 65536 % below; }
static void *noise(size_t bytes) /* exactly as long as it must be */
{
    unsigned char *at = malloc(bytes ? bytes : 1);
    for (size_t i = 0; i < bytes; ++i) at[i] = (unsigned char)draw(60);
    return at;
}

int main(void)
{
    for (int round = 0; round < 6000; ++round) {
        qkv_set_level(round % 3);
        ptrdiff_t out = 1 + draw(draw(4) ? 12 : 80), in = 1 + draw(300);
        ptrdiff_t group = draw(2) ? 16 * (1 + draw(12)) : 1 + draw(200);
        int interleaved = round % 3 == 2 && !draw(3);
        if (interleaved) out = 16 * (1 + draw(4)), group = 16 * (1 + draw(12));
        int kind = draw(3), zero_points = kind < 2 && draw(2), dtype = draw(3), biased = draw(2);
        ptrdiff_t rows = draw(draw(4) ? 18 : 60);
        size_t groups = (in + group - 1) / group, length = kind == 0 ? group : (group + 1) / 2, size = dtype ? 2 : 4;
        void *codes = noise(out * groups * length), *x = noise(rows * in * size), *bias = noise(out * size);
        float *scale = noise(out * groups * 4);
        uint8_t *zero = zero_points ? noise(out * groups) : NULL;
        void *y = malloc(rows * out * size + 1), *values = malloc(out * in * size), *w = noise(out * in * size);
        for (size_t i = 0; i < out * groups; ++i) scale[i] = 0.01f * (float)(1 + draw(50));
        float *b = biased ? bias : NULL;
        struct qkv_weight weight = {codes, scale, zero, kind, interleaved, out, in, group, groups, length};
        int mode = interleaved ? 1 : dtype; /* bf16 is no longer than what the others have */
        qkv_linear(&weight, x, b, y, rows, mode * 5 + 16 * (interleaved || draw(2)) + 64);
        qkv_dequantize(codes, scale, zero, values, out, in, group, kind, dtype, 1);
        qkv_quantize(w, codes, scale, zero, out, in, group, kind, !zero_points, dtype, draw(2), 1);
        qkv_read(w, out * in * size, 1);
        free(codes), free(x), free(bias), free(scale), free(zero), free(y), free(values), free(w);
    }
    puts("clean");
    return 0;
}
"""


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    run_sanitized(DRIVER, tmp_path)
