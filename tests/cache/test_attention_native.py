"""The native attention against the torch one in float64, at every dispatch level the processor has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.cache import attention, attention_native, attention_torch
from qkv.cache.attention_case import Asked, Attended
from qkv.cache.codec import AXES, BITS, Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.retention import Importance, KeepAll, Retention, Window
from qkv.cache.rotation import Rotation
from qkv.cache.settings import LayerSettings
from qkv.cache.storages import peak_nbytes
from qkv.cache.table import BlockTable
from qkv.errors import QkvError
from qkv.quantizers.kernels import native, native_attention
from tests.helpers import fails

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUTPUT_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Rounding of the output itself, relative."""
ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-4, torch.float16: 3e-4}
"""Of probabilities, and of outputs relative to the largest: 24 and 16 bits of the small operand."""


def filled(
    settings: LayerSettings,
    heads: int,
    dims: tuple[int, int],
    length: int,
    tokens: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> CacheLayer:
    """A layer of one row: ``length`` committed tokens and ``tokens`` open ones."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int, dim: int) -> Tensor:
        made = torch.randn(1, heads, count, dim, generator=generator)
        return (made + 3 * (torch.arange(dim) % 5 == 0)).to(dtype)  # some channels far from zero

    layer = CacheLayer(settings)
    for start in range(0, length, 23):
        count = min(23, length - start)
        layer.append(random(count, dims[0]), random(count, dims[1]))
        layer.commit()
    layer.append(random(tokens, dims[0]), random(tokens, dims[1]))
    return layer


def ask(layer: CacheLayer, group: int, tokens: int, seed: int = 1, **options: Any) -> Asked:
    """Queries over a layer's first row, with mass unless said otherwise."""
    view = layer.attendable()[0]
    heads, _, dim = view.tail_keys.shape
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads * group, tokens, dim, generator=generator).to(view.tail_keys.dtype)
    return Asked(queries, view, dim**-0.5, layer.block_size, **{"with_mass": True, **options})


def check(asked: Asked) -> Attended:
    """The native answer, compared with torch's in float64."""
    exact = attention_torch.attend(replace(asked, queries=asked.queries.double()))
    assert attention_native.refuses(asked) is None
    found = attention_native.attend(asked)
    dtype = asked.queries.dtype
    assert found.output.dtype == dtype and found.output.shape == exact.output.shape
    size = float(exact.output.abs().max())
    near(found.output, exact.output, OUTPUT_STEP[dtype] * exact.output.abs() + ERROR[dtype] * size + 1e-7)
    if asked.with_mass:
        assert found.mass is not None and found.focus is not None and exact.mass is not None and exact.focus is not None
        assert found.mass.dtype == torch.float32
        most = ERROR[dtype] * asked.queries.shape[0]
        near(found.mass, exact.mass, torch.full_like(found.mass, most))
        near(found.focus, exact.focus, torch.full_like(found.focus, most))
    return found


def near(found: Tensor, exact: Tensor, limit: Tensor) -> None:
    assert found.shape == exact.shape
    worst = ((found.double() - exact).abs() / limit).max().item() if found.numel() else 0.0
    assert worst <= 1, f"{worst:.3g} times the tolerance"


PAIRS = [
    ("exact", "exact"), ("int8", "int8"), ("int4", "int4"), ("int2", "int2"), ("nf4", "nf4"),
    ("int8:token", "int8:channel"),
    ("int4:token:plain", "int4:channel:rotate"), ("int2:token:g16", "int2:channel"), ("nf4:channel", "nf4:channel"),
    ("int4:g8", "int4:g8"), ("int8:token:g7", "int4:g3"), ("int8", "exact"), ("exact", "nf4"),
]  # fmt: skip
SHAPES = [
    (2, 4, (128, 128), 300, 1, 64), (3, 3, (64, 64), 150, 4, 64), (1, 2, (33, 33), 90, 3, 16),
    (2, 1, (80, 48), 99, 16, 24),
    (1, 5, (256, 256), 160, 2, 100), (1, 1, (96, 72), 20, 1, 8), (1, 2, (32, 24), 0, 2, 8),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_the_matrix(level: str, keys: str, values: str) -> None:
    codecs = Codec.parse(keys, "channel"), Codec.parse(values, "token")
    for index, (heads, group, dims, length, tokens, block_size) in enumerate(SHAPES):
        dtype = DTYPES[index % 2]
        layer = filled(LayerSettings(*codecs, block_size=block_size, residual=5), heads, dims, length, tokens, dtype)
        check(ask(layer, group, tokens))


@st.composite
def questions(draw: st.DrawFn) -> tuple[CacheLayer, Asked]:
    """Any codecs, sizes, policy, mask and options; the layer must outlive what is asked of it."""
    codecs = []
    for _ in range(2):
        axis, size = draw(st.sampled_from(AXES)), draw(st.one_of(st.none(), st.integers(1, 70)))
        codecs.append(Codec(draw(st.sampled_from(list(BITS))), axis, size, draw(st.sampled_from((None, True, False)))))
    residual, block_size = draw(st.integers(0, 20)), draw(st.integers(1, 80))
    retain: Retention = draw(
        st.sampled_from([KeepAll(), Window(40, sinks=3), Window(150, sinks=2, rerotate=True),
                         Window(60, sinks=2, summary=5), Importance(90, sinks=3)])
    )  # fmt: skip
    dims = (2 * draw(st.integers(4, 70)), draw(st.integers(1, 140)))
    rotation = Rotation(tuple(10.0 ** -(i / 4) for i in range(4)), trained_positions=100)
    shape = LayerSettings(
        codecs[0], codecs[1], block_size=block_size, residual=residual, retain=retain, rotation=rotation
    )
    heads, group, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 16))
    rest = (heads, dims, draw(st.integers(0, 220)), tokens, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999)))
    try:
        layer = filled(shape, *rest)
    except QkvError:  # a budget that does not hold what must stay
        layer = filled(replace(shape, retain=KeepAll()), *rest)
    options: dict[str, Any] = {"with_mass": draw(st.booleans()), "softcap": draw(st.sampled_from((None, 3.0)))}
    if draw(st.booleans()):
        options["sink_logits"] = torch.randn(heads * group)
    if draw(st.booleans()):
        parents = torch.rand(tokens, tokens) < 0.5
        options["open_mask"] = (parents | torch.eye(tokens, dtype=torch.bool)).tril()
        options["positions"] = layer.attendable()[0].first_query + options["open_mask"].sum(1) - 1
    return layer, ask(layer, group, tokens, **options)


@settings(max_examples=150)
@given(question=questions(), name=st.sampled_from(native.LEVELS))
def test_any_question(question: tuple[CacheLayer, Asked], name: str) -> None:
    before = native.level()
    native.set_level(name)
    try:
        check(question[1])
    finally:
        native.set_level(before)


def plain(codec: str = "int8", tokens: int = 1, length: int = 2500) -> tuple[CacheLayer, Asked]:
    codecs = Codec.parse(codec, "channel"), Codec.parse(codec, "token")
    layer = filled(LayerSettings(*codecs), 2, (64, 64), length, tokens, torch.bfloat16)
    return layer, ask(layer, 3, tokens)


@pytest.mark.parametrize("codec", ["int8", "nf4", "exact"])
def test_threads_change_no_bit(level: str, codec: str) -> None:
    (_layer, asked), before, found = plain(codec), torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(attention_native.attend(asked))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(found[0].output, other.output)
        assert other.mass is not None and found[0].mass is not None and torch.equal(found[0].mass, other.mass)


@pytest.mark.parametrize("codec", ["int8", "int4", "nf4", "exact"])
def test_a_query_gives_the_same_bits_in_any_company(level: str, codec: str) -> None:
    """Verifying a draft attends as decoding its tokens one by one does."""
    _layer, asked = plain(codec, tokens=7, length=300)
    whole = attention_native.attend(asked).output
    view = asked.view
    for count in (1, 2, 5):
        cut = view.tail_keys.shape[1] - 7 + count
        part = replace(view, tail_keys=view.tail_keys[:, :cut], tail_values=view.tail_values[:, :cut], num_open=count)
        found = attention_native.attend(replace(asked, queries=asked.queries[:, :count], view=part)).output
        assert torch.equal(found, whole[:, :count])


def test_strided_queries_and_tail(level: str) -> None:
    _layer, asked = plain(tokens=3, length=200)
    view = asked.view
    apart = [torch.stack((t.transpose(0, 1), t.transpose(0, 1)), 2)[:, :, 0].transpose(0, 1) for t in
             (asked.queries, view.tail_keys, view.tail_values)]  # fmt: skip
    moved = replace(asked, queries=apart[0], view=replace(view, tail_keys=apart[1], tail_values=apart[2]))
    assert torch.equal(attention_native.attend(moved).output, attention_native.attend(asked).output)


@pytest.mark.parametrize("codec", ["int8", "int4:token", "nf4", "exact"])
def test_nan_stays_visible(level: str, codec: str) -> None:
    codecs = Codec.parse(codec, "channel"), Codec.parse(codec, "token")
    for part in range(2):
        layer = CacheLayer(LayerSettings(*codecs, block_size=8, residual=2))
        made = [torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32)]
        made[part][0, 0, 3, 5] = torch.nan
        layer.append(made[0], made[1])
        layer.commit()
        layer.append(torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32))
        asked = ask(layer, 2, 1)
        found, want = attention_native.attend(asked).output, attention_torch.attend(asked).output
        assert torch.equal(found.isnan(), want.isnan()) and found[:2].isnan().any() and not found[2:].isnan().any()


def test_addresses_are_looked_up_again_once_blocks_move(level: str) -> None:
    """Sealing, evicting, forking and cropping move blocks; old storages must be neither read nor kept."""
    retain = Importance(70, sinks=0)
    layer = CacheLayer(LayerSettings(Codec("int8", "channel"), Codec("int4"), block_size=8, residual=4, retain=retain))
    torch.manual_seed(0)
    for step in range(120):
        layer.append(torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32))
        found = check(ask(layer, 2, 1))
        layer.observe(0, found.mass, found.focus, None)
        layer.commit()
        if step == 60:
            layer = layer.fork()
        if step % 25 == 24:
            layer.crop(7)


def test_what_it_refuses_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    _layer, asked = plain(length=80)
    assert attention.choose(asked) is attention_native
    many = replace(asked, queries=asked.queries.repeat(1, 17, 1))
    assert "16 queries" in str(attention_native.refuses(many)) and attention.choose(many) is attention_torch
    assert "float64" in str(attention_native.refuses(replace(asked, queries=asked.queries.double())))
    assert "above 0" in str(attention_native.refuses(replace(asked, scale=-1.0)))
    wanted = replace(asked, queries=asked.queries.clone().requires_grad_())
    assert "differentiated" in str(attention_native.refuses(wanted)) and attention_torch.refuses(wanted) is None
    for forced, backend in (("reference", attention_torch), ("torch", attention_torch), ("avx2", attention_native)):
        monkeypatch.setenv("QKV_KERNELS", forced)
        assert attention.choose(asked) is backend
    assert [row.name for row in attention.status()] == ["native", "triton", "torch"]


def test_scratch_is_small() -> None:
    """A few ranges of a few numbers a head, whatever the length: here under a hundredth of what is read."""
    peaks = []
    for length in (4096, 16384):
        layer = CacheLayer(LayerSettings(Codec("int8", "channel"), Codec("int8")))
        layer.append(torch.randn(1, 2, length, 64), torch.randn(1, 2, length, 64))
        layer.commit()
        layer.append(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
        asked = ask(layer, 2, 1, with_mass=False)
        peaks.append(peak_nbytes(lambda asked=asked: attention_native.attend(asked)))  # type: ignore[misc]
        assert peaks[-1] < layer.nbytes / 100
    assert peaks[1] < 1.1 * 4 * peaks[0] and peaks[1] < 100_000


def without(**fields: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutant that forgets fields of every call."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        run = native_attention.run

        def mutant(call: native_attention.Call) -> None:
            for name, value in fields.items():
                setattr(call, name, value)
            run(call)

        patch.setattr(attention_native, "run", mutant)

    return mutate


def without_zero_points(patch: pytest.MonkeyPatch) -> None:
    find = BlockTable.find

    def mutant(self: BlockTable, blocks: Any) -> Any:
        runs, starts = find(self, blocks)
        for first in range(0, len(runs), 8):
            runs[first + 4] = 0
        return runs, starts

    patch.setattr(BlockTable, "find", mutant)


def stale(patch: pytest.MonkeyPatch) -> None:
    """Addresses that are never looked up again, and read what was there at the first step."""
    find = BlockTable.find
    first: list[Any] = []

    def mutant(self: BlockTable, blocks: Any) -> Any:
        if not first and blocks:
            first.extend((find(self, blocks), [dict(block.slab.tensors) for block in blocks]))  # kept to be readable
        return first[0] if first else find(self, blocks)

    patch.setattr(BlockTable, "find", mutant)


def law() -> None:
    policies = [(KeepAll(), 90), (Window(40, sinks=3), 90), (Window(6, sinks=3), 14), (Importance(200, sinks=3), 90)]
    for retain, length in policies:
        shape = LayerSettings(Codec("int8", "channel"), Codec("int4"), block_size=16, residual=5, retain=retain)
        layer = filled(shape, 2, (32, 32), length, 3, torch.float32)
        check(ask(layer, 2, 3, softcap=3.0))
        layer.commit()
        layer.append(torch.randn(1, 2, 3, 32), torch.randn(1, 2, 3, 32))
        check(ask(layer, 2, 3, sink_logits=torch.zeros(4)))


MUTANTS = [
    without(reach=0), without(hidden=0), without(sinks=0), without(softcap=0.0), without(sink_logits=None),
    without(num_open=1), without_zero_points, stale,
]  # fmt: skip


def test_the_law_holds() -> None:
    law()


@pytest.mark.parametrize("mutate", MUTANTS)
def test_mutants_fail(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert fails(law)
