"""Codecs: what comes back, what it takes, and what must not break them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.cache.codec import AXES, BITS, CODECS, Codec
from qkv.errors import QkvError

LOSSY = [name for name in BITS if name != "exact"]
BITS_AN_ELEMENT = {"int8": 8.5, "int4": 4.5, "int2": 3.0, "nf4": 4.25}


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dim", [1, 32, 33, 64, 80, 128, 256])
def test_layout_is_what_encode_makes(name: str, axis: str, dim: int) -> None:
    codec = Codec(name, axis)
    x = torch.randn(3, 2, 64, dim)
    stored = codec.encode(x)
    layout = codec.layout(2, 64, dim, torch.float32)
    assert {n: (tuple(t.shape[1:]), t.dtype) for n, t in stored.items()} == layout
    assert sum(t.nbytes for t in stored.values()) == 3 * codec.stored_nbytes(2, 64, dim, torch.float32)
    assert codec.decode(stored, dim, torch.float32).shape == x.shape


@pytest.mark.parametrize("name", LOSSY)
def test_bits_an_element_count_the_metadata(name: str) -> None:
    nbytes = Codec(name, "channel").stored_nbytes(2, 64, 64, torch.float32)
    assert nbytes * 8 / (2 * 64 * 64) == BITS_AN_ELEMENT[name]


def test_exact_is_bit_for_bit() -> None:
    x = torch.randn(2, 3, 16, 8, dtype=torch.bfloat16)
    assert torch.equal(CODECS["exact"].decode(CODECS["exact"].encode(x), 8, torch.bfloat16), x)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["int8", "int4"]),
    axis=st.sampled_from(AXES),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]),
    offset=st.sampled_from([0.0, 1.0, -300.0, 30_000.0]),
    seed=st.integers(0, 2**16),
)
def test_error_is_at_most_half_a_step(name: str, axis: str, scale: float, offset: float, seed: int) -> None:
    codec = Codec(name, axis, 16, rotate=False)
    x = (torch.randn(2, 2, 32, 32, generator=torch.Generator().manual_seed(seed)) + offset) * scale
    stored = codec.encode(x)
    step = stored["scale"].float()
    step = step.repeat_interleave(16, 2) if axis == "channel" else step.repeat_interleave(16, 3)
    error = (codec.decode(stored, 32, torch.float32) - x).abs()
    assert bool((error <= step * 0.51 + x.abs() * 1e-6).all())
    assert bool((step <= (x.amax() - x.amin()) / (2**codec.bits - 1) * 1.01 + x.abs().max() / 30_000).all())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("axis", AXES)
def test_groups_of_zeros_constants_and_extremes_stay_right(name: str, axis: str) -> None:
    codec = Codec(name, axis, 16, rotate=False)
    for value in (0.0, 7.0, -3.0, 1e-38, 1e38):
        x = torch.full((1, 1, 32, 16), value)
        back = codec.decode(codec.encode(x), 16, torch.float32)
        assert bool(back.isfinite().all())
        assert torch.allclose(back, x, rtol=0.01, atol=1e-37)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spreads_and_stays_in_its_group(name: str, bad: float) -> None:
    codec = Codec(name, "token", 16, rotate=False)
    x = torch.randn(1, 1, 8, 32)
    x[0, 0, 3, 5] = bad
    back = codec.decode(codec.encode(x), 32, torch.float32)
    assert bool(back[0, 0, 3, :16].isnan().all())
    back[0, 0, 3, :16] = 0
    assert bool(back.isfinite().all())


def test_outlier_channels_do_not_drown_the_others() -> None:
    """vllm#10411: a few key channels a hundred times larger than the rest."""
    keys = torch.randn(1, 2, 256, 64)
    keys[..., 3] += 300
    keys[..., 40] -= 300
    queries = torch.randn(2, 16, 64) * 1.5
    queries[..., [3, 40]] *= 0.01
    codec = Codec.parse("int8", "channel")
    blocks = keys[0].view(2, 4, 64, 64).transpose(0, 1)
    back = codec.decode(codec.encode(blocks), 64, torch.float32).transpose(0, 1).flatten(1, 2)
    exact = (queries @ keys[0].transpose(1, 2) / 8).softmax(-1)
    found = (queries @ back.transpose(1, 2) / 8).softmax(-1)
    assert float((exact - found).abs().sum(-1).mean() / 2) < 0.05


def test_rotation_spreads_an_outlier() -> None:
    x = torch.randn(1, 1, 64, 64)
    x[..., 7] += 50
    plain, rotated = (Codec("int2", "token", 32, rotate=r) for r in (False, True))
    errors = [(c.decode(c.encode(x), 64, torch.float32) - x)[..., 32:].abs().mean() for c in (plain, rotated)]
    assert Codec("int4").is_rotated and not Codec("int4", "channel").is_rotated
    assert errors[1] < 10 * errors[0]


def test_parse_reads_what_str_writes() -> None:
    for text in ("int8", "int4:channel:g32", "int2:token:g16:plain", "nf4:rotate", "exact"):
        codec = Codec.parse(text, "token")
        assert Codec.parse(str(codec)) == codec
    assert Codec.parse("int8", "channel").axis == "channel"


@pytest.mark.parametrize("text", ["int3", "int8:row", "int8:g0", "int8:gx", "", "int8:g64:fast"])
def test_bad_names_are_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(QkvError, match=r"choose from|options|whole number|not per"):
        Codec.parse(text)
