"""The Triton walk over blocks under its interpreter; tests/test_triton.py runs this in its own process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.cache import triton_walk
from qkv.cache.blocks import BlockLayout, decode_slots
from qkv.cache.codec import Codec
from qkv.cache.hadamard import spread
from qkv.cache.triton_walk import Pages, Walked, Window, pages, walk_blocks
from qkv.quantizers.kernels.triton_live import interpreted

assert interpreted()

CODECS = (("int8:channel", "int8:token"), ("int4:channel", "int4:token"), ("int8:token:g16", "int4:token:g16:plain"))
BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-5}
NAMES = ("keys.codes", "values.codes", "keys.scale", "values.scale", "keys.zero", "values.zero")


class Stored:
    """Random blocks of one row, in slabs of two and one blocks, and what they decode to."""

    def __init__(self, layout: BlockLayout, seed: int) -> None:
        torch.manual_seed(seed)
        self.layout, self.slabs, self.starts, number = layout, [], [], 0
        keys, values = [], []
        for blocks in (2, 1, 2):
            shape = (blocks, layout.heads, layout.block_size)
            k, v = torch.randn(*shape, layout.key_dim) + 1, torch.randn(*shape, layout.value_dim)
            slab = {f"keys.{n}": t for n, t in layout.keys.encode(k).items()}
            slab |= {f"values.{n}": t for n, t in layout.values.encode(v).items()}
            self.slabs.append(slab)
            self.starts += [layout.block_size * (number + b) for b in range(blocks)]
            number += blocks
            found = decode_slots(layout, slab)
            keys.append(found[0].double().transpose(0, 1).flatten(1, 2))
            values.append(found[1].double().transpose(0, 1).flatten(1, 2))
        self.keys, self.values = torch.cat(keys, 1), torch.cat(values, 1)

    def table(self) -> tuple[list[int], list[int]]:
        rows = []
        for slab in self.slabs:
            rows += [slab[name].data_ptr() for name in NAMES]
            rows += [slab["keys.codes"].shape[0], self.layout.block_size]
        return rows, self.starts


def layout_of(keys: str, values: str, dims: tuple[int, int] = (64, 32)) -> BlockLayout:
    return BlockLayout(2, dims[0], dims[1], 16, Codec.parse(keys), Codec.parse(values), torch.float32)


def dense(queries: Tensor, stored: Stored, seen: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Output and probabilities ``[heads, rows, tokens]`` in float64; ``seen [rows, tokens]``."""
    scores = queries.double() @ stored.keys.transpose(1, 2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    probabilities = scores.softmax(-1)
    return probabilities @ stored.values, probabilities


def walked(
    queries: Tensor, layout: BlockLayout, found: Pages, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, Walked]:
    rotated = spread(queries) if layout.keys.is_rotated else queries
    result = walk_blocks(rotated.contiguous(), found, dtype, **options)
    output = result.output / result.total[..., None]
    return (spread(output) if layout.values.is_rotated else output), result


@pytest.mark.parametrize(("keys", "values"), CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_is_that_of_what_the_blocks_decode_to(keys: str, values: str, dtype: torch.dtype) -> None:
    layout = layout_of(keys, values)
    batch = [Stored(layout, 0), Stored(layout, 1)]
    for rows in (1, 4, 20):
        queries = (torch.randn(2, 2, rows, 64) / 8).to(dtype).float()
        found = pages(layout, [stored.table() for stored in batch], queries.device)
        output, _ = walked(queries, layout, found, dtype)
        for index, stored in enumerate(batch):
            want, _ = dense(queries[index], stored, None, None)
            assert float((output[index] - want).abs().max()) <= BOUND[dtype] * float(stored.values.abs().max())


@pytest.mark.parametrize(("hidden", "reach", "softcap"), product((0, 5), (None, 30), (None, 2.0)))
def test_masks_soft_caps_and_the_mass_of_blocks(hidden: int, reach: int | None, softcap: float | None) -> None:
    layout, tokens = layout_of("int8:channel", "int8:token"), 3
    stored = Stored(layout, 2)
    queries = torch.randn(1, 2, 2 * tokens, 64) / 4
    positions = torch.tensor([80, 81, 85])
    key = torch.arange(80)
    seen = (key >= hidden)[None].expand(tokens, -1)
    if reach is not None:
        seen = seen & (key[None] > positions[:, None] - reach)
    found = pages(layout, [stored.table()], queries.device)
    window = Window(hidden, reach, positions) if hidden or reach else None
    output, result = walked(queries, layout, found, torch.float32, window=window, softcap=softcap, with_mass=True)
    want, probabilities = dense(queries[0], stored, seen.repeat(2, 1), softcap)
    assert torch.allclose(output[0].double(), want, atol=2e-5)
    assert result.observed is not None
    mass, norm, peak = result.observed
    factor = torch.exp(peak - result.peak[0][..., None]) / result.total[0][..., None]
    by_block = torch.unflatten(probabilities, -1, (5, 16))
    assert torch.allclose((mass * factor).double(), by_block.sum(-1), atol=1e-5)
    assert torch.allclose((norm * factor).double(), by_block.norm(dim=-1), atol=1e-5)


def test_a_row_that_sees_nothing_has_nothing_to_say() -> None:
    layout = layout_of("int8:channel", "int8:token")
    stored = Stored(layout, 3)
    queries = torch.randn(1, 2, 1, 64)
    window = Window(1000, None, torch.tensor([80]))
    result = walk_blocks(queries, pages(layout, [stored.table()], queries.device), torch.float32, window=window)
    assert not bool(result.total.any()) and not bool(result.output.any())
    assert bool((result.peak == -1e30).all())


@pytest.mark.parametrize(
    ("keys", "values", "dims", "said"),
    [
        ("nf4", "int8", (64, 64), "not nf4"),
        ("int8:channel", "exact", (64, 64), "not exact"),
        ("int8:channel", "int8", (96, 64), "powers of two, not 96"),
        ("int8:channel", "int8:channel", (64, 64), "scale a token"),
        ("int8:channel:g8", "int8", (64, 64), "one scale a channel"),
    ],
)
def test_what_it_does_not_serve_is_refused(keys: str, values: str, dims: tuple[int, int], said: str) -> None:
    layout = layout_of(keys, values, dims)
    assert said in str(triton_walk.refuses(layout, torch.bfloat16, torch.device("cpu")))
    assert triton_walk.refuses(layout_of("int8:channel", "int4"), torch.bfloat16, torch.device("cpu")) is None
    assert triton_walk.refuses(layout, torch.float64, torch.device("cpu"))
