from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.quantizers.double_quant import decode_scale, dynamic_map, encode_scale
from qkv.quantizers.format import NESTED_BLOCK
from qkv.quantizers.quantize import quantize_tensor
from tests.laws import EPS, sample

CPU = torch.device("cpu")


def test_the_map_is_sorted_and_holds_its_landmarks() -> None:
    table = dynamic_map(CPU)
    assert len(table) == 256 and bool((table[1:] > table[:-1]).all())
    assert {0.0, 1.0} <= set(table.tolist()) and float(table[0]) == -float(table[-2])


@given(st.integers(0, 2000), st.integers(0, 2**31), st.booleans())
def test_a_decoded_scale_is_the_nearest_code_or_the_next_above(count: int, seed: int, never_below: bool) -> None:
    scale = sample("magnitudes", (count,), seed).abs().clamp(max=1e30) if seed % 2 else torch.rand(count) + 0.5
    nested = encode_scale(scale, never_below=never_below)
    assert nested.codes.shape == scale.shape and nested.absmax.shape == (-(-count // NESTED_BLOCK),)
    assert nested.codes.untyped_storage().nbytes() == count
    decoded = decode_scale(nested, math.inf).double()
    slack = EPS * (scale.double().abs() + nested.offset.double().abs())
    if never_below:
        assert bool((decoded >= scale.double() - slack).all())
    table = dynamic_map(CPU).double()
    for start in range(0, count, NESTED_BLOCK):
        part = slice(start, start + NESTED_BLOCK)
        choices = table * nested.absmax[start // NESTED_BLOCK].double() + nested.offset.double()
        distance = choices - scale[part, None].double()
        best = distance.clamp(min=0).where(distance >= 0, math.inf) if never_below else distance.abs()
        found = (decoded[part] - scale[part].double()).abs()
        allowed = best.amin(-1).nan_to_num(posinf=0.0) + 2 * slack[part]
        if not never_below:
            allowed = allowed.clamp(max=math.inf)
        assert bool((found <= allowed).all())


def test_blocks_of_256_do_not_disturb_each_other() -> None:
    scale = torch.rand(4 * NESTED_BLOCK) + 1
    other = scale.clone()
    other[:NESTED_BLOCK] = scale[:NESTED_BLOCK].flip(0)  # the mean stays
    first, second = (decode_scale(encode_scale(s, never_below=False), math.inf) for s in (scale, other))
    assert torch.equal(first[NESTED_BLOCK:], second[NESTED_BLOCK:])


def test_integer_scales_still_span_their_groups() -> None:
    x = sample("normal", (64, 512), 1)
    for text in ("int8", "int4"):
        plain, double = quantize_tensor(x, text).float_scale(), quantize_tensor(x, f"{text}:double").float_scale()
        assert bool((double >= plain * (1 - EPS)).all())
        assert float((double / plain - 1).max()) < 0.1
