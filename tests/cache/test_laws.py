"""The laws of a layer (see qkv/cache/layer.py), as properties; and mutants that must break them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkv.cache.attention import attend
from qkv.cache.blocks import BlockStore
from qkv.cache.codec import Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.observation import Observations, Seen
from qkv.cache.retention import Importance, KeepAll, RandomBlocks, Retention, Window
from qkv.cache.row import Row
from qkv.cache.sealing import seal
from qkv.cache.settings import LayerSettings
from qkv.cache.tail import Tail

HEADS, GROUP, DIM = 2, 2, 8
POLICIES: list[Retention] = [
    KeepAll(),
    Window(11, sinks=3),
    Window(13, sinks=2, summary=6),
    Importance(26, sinks=3),
    RandomBlocks(26, sinks=3),
    Importance(0.6, sinks=2),
]


def make(codec: str = "exact", retain: Retention | None = None, size: int = 4, residual: int = 3) -> CacheLayer:
    codecs = (Codec.parse(codec, "channel"), Codec.parse(codec, "token"))
    return CacheLayer(LayerSettings(*codecs, block_size=size, residual=residual, retain=retain or KeepAll()))


def tokens(count: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries of ``count`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, count, DIM)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return keys, values, torch.randn(batch, HEADS * GROUP, count, DIM, generator=generator)


def step(layer: CacheLayer, part: tuple[Tensor, ...], starts: list[int] | None = None) -> list[Tensor]:
    """Append tokens and attend with their queries; returns each row's output and leaves the tokens open."""
    keys, values, queries = part
    layer.append(keys, values, starts=starts)
    outputs = []
    for index, view in enumerate(layer.attendable()):
        count = min(view.num_open, queries.shape[2])
        own = queries[index, :, queries.shape[2] - count :]
        if count == 0:
            outputs.append(own.new_zeros(HEADS * GROUP, 0, DIM))
            continue
        seen = attend(own, view, scale=DIM**-0.5, block_size=layer.block_size, with_mass=True)
        missing = queries.shape[2] - count
        assert seen.mass is not None and seen.focus is not None
        padded = [torch.nn.functional.pad(t, (0, 0, missing, 0)) for t in (seen.mass, seen.focus)]
        grouped = torch.nn.functional.pad(torch.unflatten(own, 0, (HEADS, GROUP)), (0, 0, missing, 0))
        layer.observe(index, padded[0], padded[1], grouped)
        outputs.append(seen.output)
    return outputs


def cut(part: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return tuple(t[:, :, start:stop] for t in part)


def same_state(one: CacheLayer, other: CacheLayer, atol: float = 0.0) -> bool:
    (tensors, metadata), (others, other_metadata) = one.state(), other.state()
    assert metadata == other_metadata, (metadata, other_metadata)
    assert tensors.keys() == others.keys()
    return all(torch.allclose(t.float(), others[n].float(), rtol=0, atol=atol) for n, t in tensors.items())


def check_law_1_drafts(seed: int, retain: Retention, codec: str) -> None:
    """What is held does not depend on drafts: with rejected tokens tried at every step, the same bits."""
    rng, part = random.Random(seed), tokens(60, seed=seed)
    plain, drafted = make(codec, retain), make(codec, retain)
    at = 0
    while at < 60:
        count = min(rng.choice([1, 1, 2, 5, 9]), 60 - at)
        step(plain, cut(part, at, at + count))
        plain.commit()
        wrong = tokens(rng.randint(1, 8), seed=rng.randint(1, 999))
        if rng.random() < 0.5:
            step(drafted, wrong)
            drafted.discard()
            step(drafted, cut(part, at, at + count))
            drafted.commit()
        else:
            both = tuple(torch.cat((t, w), 2) for t, w in zip(cut(part, at, at + count), wrong, strict=True))
            step(drafted, both)
            drafted.commit(count)
        at += count
    assert same_state(plain, drafted, atol=2e-5)


def check_law_1_neighbours(seed: int, retain: Retention, codec: str) -> None:
    """A padded row in a batch holds, and answers, what it does alone."""
    rng = random.Random(seed)
    part, pads, count = tokens(50, batch=3, seed=seed), [0, rng.randint(1, 9), rng.randint(10, 24)], 50
    batch = make(codec, retain)
    alone = [make(codec, retain) for _ in pads]
    at = 0
    while at < count:
        size = min(rng.choice([1, 3, 8]), count - at)
        together = step(batch, cut(part, at, at + size), starts=pads)
        batch.commit()
        for index, (layer, pad) in enumerate(zip(alone, pads, strict=True)):
            own = cut(tuple(t[index : index + 1] for t in part), max(at, pad), max(at + size, pad))
            if own[0].shape[2]:
                assert torch.allclose(step(layer, own)[0], together[index], atol=1e-5)
                layer.commit()
                assert layer.rows[0].held_tokens(layer.lengths[0]) == batch.rows[index].held_tokens(layer.lengths[0])
        at += size
    for index, layer in enumerate(alone):
        mine, theirs = layer.rows[0], batch.rows[index]
        assert [b.start for b in mine.blocks] == [b.start for b in theirs.blocks]
        for one, other in zip(mine.blocks, theirs.blocks, strict=True):
            assert all(torch.equal(t, other.tensors()[n]) for n, t in one.tensors().items())


def check_law_2_sealed(seed: int) -> None:
    """Nothing uncommitted changes a sealed block, and no block is encoded twice."""
    part, layer = tokens(40, seed=seed), make("int8")
    before: dict[int, Tensor] = {}
    for at in range(0, 40, 2):
        step(layer, cut(part, at, at + 2))
        for block in layer.rows[0].blocks:
            assert torch.equal(block.tensors()["keys.codes"], before[block.start])
        layer.commit()
        for block in layer.rows[0].blocks:
            codes = block.tensors()["keys.codes"].clone()
            assert torch.equal(codes, before.setdefault(block.start, codes))


def check_law_3_bytes(layer: CacheLayer) -> None:
    """``nbytes`` is the sum of the storages held: those of the stores, the tail and the statistics."""
    stores = sum(s.nbytes for s in (layer.store, layer._exact) if s is not None)
    statistics = [t for r in layer.rows for t in (r.mass, r.focus, r.summary_weights) if t is not None]
    total = stores + sum(t.untyped_storage().nbytes() for t in statistics) + layer.observations.nbytes
    assert layer.nbytes == total + (layer.tail.nbytes if layer.tail is not None else 0)


def check_references(layers: list[CacheLayer]) -> None:
    """References of a store equal the entries of all tables over it (law 4)."""
    for name in ("store", "_exact"):
        stores: set[BlockStore] = {getattr(v, name) for v in layers if getattr(v, name) is not None}
        for store in stores:
            entries = [block for layer in layers for row in layer.rows for block in row if block.store is store]
            assert store.references == len(entries)
            assert store.num_blocks == len({id(block) for block in entries})


def check_interleavings(seed: int, codec: str = "exact", size: int = 4, residual: int = 3) -> None:
    """Random steps on a family of forks, against plain tensors; the exact codec to the last bit."""
    rng = random.Random(seed)
    empty = torch.zeros(2, HEADS, 0, DIM)
    family: list[tuple[CacheLayer, Tensor, Tensor]] = [(make(codec, None, size, residual), empty, empty)]
    for turn in range(40):
        index = rng.randrange(len(family))
        layer, keys, values = family[index]
        batch = keys.shape[0]
        action = rng.choice(["append"] * 5 + ["crop", "reorder", "repeat", "select", "fork", "ragged", "drop"])
        if action in ("append", "ragged"):
            new = tokens(rng.choice([1, 2, size - 1 or 1, size, size + 1, 13]), batch, seed * 1000 + turn)
            layer.append(new[0], new[1])
            found = layer.dense()
            whole = torch.cat((keys, new[0]), 2), torch.cat((values, new[1]), 2)
            if codec == "exact":
                assert torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])
            count = rng.randint(0, new[0].shape[2])
            layer.commit(None if action == "append" else count)
            kept = whole[0].shape[2] if action == "append" else keys.shape[2] + count
            keys, values = whole[0][:, :, :kept], whole[1][:, :, :kept]
        elif action == "crop":
            gone = rng.choice([0, 1, size, size + residual, 200])
            layer.crop(gone)
            keys, values = (t[:, :, : max(0, t.shape[2] - gone)] for t in (keys, values))
            if not keys.shape[2]:
                keys = values = empty
        elif action in ("reorder", "repeat", "select") and keys.shape[2]:
            rows = {
                "reorder": [rng.randrange(batch) for _ in range(batch)],
                "repeat": [r for r in range(min(batch, 2)) for _ in range(2)],
                "select": sorted(rng.sample(range(batch), max(1, batch - 1))),
            }[action]
            layer.reorder(rows)
            keys, values = keys[rows], values[rows]
        elif action == "fork" and len(family) < 4:
            family.append((layer.fork(), keys, values))
        elif action == "drop" and len(family) > 1:
            family.pop(index)[0].reset()
            continue
        family[index] = (layer, keys, values)
        assert len(layer) == keys.shape[2]
        check_references([member for member, _, _ in family])
    for layer, keys, values in family:
        if keys.shape[2]:
            new = tokens(1, keys.shape[0], seed)
            layer.append(new[0], new[1])
            found = layer.dense()
            limit = 0.0 if codec == "exact" else 0.2
            assert float((found[0][:, :, :-1] - keys).abs().amax()) <= limit
            assert float((found[1][:, :, :-1] - values).abs().amax()) <= limit


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    retain=st.sampled_from(POLICIES),
    codec=st.sampled_from(["exact", "int8", "int4"]),
)
def test_law_1_drafts(seed: int, retain: Retention, codec: str) -> None:
    check_law_1_drafts(seed, retain, codec)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), retain=st.sampled_from(POLICIES[:5]), codec=st.sampled_from(["exact", "int8"]))
def test_law_1_neighbours(seed: int, retain: Retention, codec: str) -> None:
    check_law_1_neighbours(seed, retain, codec)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_law_2(seed: int) -> None:
    check_law_2_sealed(seed)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    retain=st.sampled_from(POLICIES),
    codec=st.sampled_from(["exact", "int4", "nf4"]),
)
def test_law_3(seed: int, retain: Retention, codec: str) -> None:
    layer, part = make(codec, retain), tokens(40, batch=2, seed=seed)
    for at in range(0, 40, 5):
        step(layer, cut(part, at, at + 5))
        check_law_3_bytes(layer)
        layer.commit()
        check_law_3_bytes(layer)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    codec=st.sampled_from(["exact", "exact", "int8"]),
    size=st.sampled_from([1, 4, 8]),
    residual=st.sampled_from([0, 3, 4, 9]),
)
def test_laws_4_and_5_under_interleavings(seed: int, codec: str, size: int, residual: int) -> None:
    check_interleavings(seed, codec, size, residual)


@pytest.mark.parametrize("retain", POLICIES, ids=lambda p: type(p).__name__)
def test_room_is_exact(retain: Retention) -> None:
    """A step of ``room()`` tokens sees what single steps see; one more token would not."""
    for length in range(1, 45):
        part = tokens(length + 12, seed=length)
        layer = make("int4", retain)
        for at in range(length):
            step(layer, cut(part, at, at + 1))
            layer.commit()
        room = min(layer.room(), 12)
        single, whole = layer.fork(), layer.fork()
        together = step(whole, cut(part, length, length + room))[0]
        for i in range(room):
            own = step(single, cut(part, length + i, length + i + 1))[0]
            single.commit()
            assert torch.allclose(own[:, 0], together[:, i], atol=2e-5), (length, room, i)
        whole.commit()
        assert same_state(single, whole, atol=2e-5)
        if layer.room() < 12:
            beyond = step(layer, cut(part, length, length + room + 1))[0][:, -1]
            own = step(single, cut(part, length + room, length + room + 1))[0][:, 0]
            assert not torch.allclose(own, beyond, atol=1e-6), (length, room)


@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("boundary", ["block", "residual", "window", "budget"])
def test_boundaries(boundary: str, around: int) -> None:
    """Everything held is right one token before, at, and after each boundary, and counted right."""
    size, residual = 4, 6
    length = {"block": size + residual, "residual": residual, "window": 11, "budget": 26}[boundary] + around
    for retain in (KeepAll(), Window(11, sinks=3), Importance(26, sinks=3)):
        layer, part = make("exact", retain, size, residual), tokens(length + 1, seed=7)
        for at in range(length):
            layer.append(part[0][:, :, at : at + 1], part[1][:, :, at : at + 1])
            layer.commit()
        assert len(layer) == length and layer.num_held <= max(26, 11 + 3 + 2 * size + residual)
        if isinstance(retain, KeepAll) and not retain.is_bounded:
            assert len(layer.rows[0].blocks) == max(0, length - residual) // size
        visible = [j for j in range(length + 1) if retain.reach is None or j < 3 or j > length - 11]
        layer.append(part[0][:, :, length:], part[1][:, :, length:])
        if not isinstance(retain, Importance):
            assert torch.equal(layer.dense()[0], part[0][:, :, visible])


def test_ragged_and_path_commits() -> None:
    """Each row keeps its own tokens: a number of them, or a path through a tree."""
    layer, part = make("exact"), tokens(20, batch=3)
    layer.append(part[0][:, :, :9], part[1][:, :, :9])
    layer.commit()
    layer.append(part[0][:, :, 9:15], part[1][:, :, 9:15])
    layer.commit([6, 2, 0])
    assert layer.lengths == [15, 11, 9] and [r.start for r in layer.rows] == [0, 4, 6]
    layer.append(part[0][:, :, 15:19], part[1][:, :, 15:19])
    layer.commit([[0, 2], [1], [0, 1, 3]])
    rows = [[*range(15), 15, 17], [*range(11), 16], [*range(9), 15, 16, 18]]
    for index, columns in enumerate(rows):
        view = layer.attendable()[index]
        blocks = [b.store.decode(b)[0] for b in layer.rows[index].blocks]
        assert torch.equal(torch.cat([*blocks, view.tail_keys], 1), part[0][index][:, columns])


def all_of(check: Callable[[int], None], seeds: range) -> None:
    for seed in seeds:
        check(seed)


_APPEND = CacheLayer.append


def drafts_count(observations: Observations, row: Row, steps: list[Seen], kept: Any) -> None:
    """Mutant: every open query counts, committed or not."""
    row.mass = observations._decayed(row.mass, [s.mass for s in steps if s.mass is not None], None)
    row.focus = observations._decayed(row.focus, [s.focus for s in steps if s.focus is not None], None)


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any], Callable[[], None]]] = {
    "fork without a reference": (
        Row,
        "fork",
        lambda self: replace(self, blocks=list(self.blocks)),
        lambda: all_of(lambda s: check_interleavings(s), range(6)),
    ),
    "discarded sights count": (
        Observations,
        "discard",
        lambda self: None,
        lambda: all_of(lambda s: check_law_1_drafts(s, Importance(26, sinks=3), "exact"), range(6)),
    ),
    "drafts are observed": (
        Observations,
        "_fold",
        drafts_count,
        lambda: all_of(lambda s: check_law_1_drafts(s, Importance(26, sinks=3), "exact"), range(6)),
    ),
    "tails keep the wrong end": (
        Tail,
        "cut",
        lambda self, columns: self._slice(slice(columns, None)) if columns else None,
        lambda: all_of(lambda s: check_interleavings(s), range(6)),
    ),
    "open tokens are sealed": (
        CacheLayer,
        "append",
        lambda self, keys, values, starts=None: _append_and_seal(self, keys, values, starts),
        lambda: all_of(lambda s: check_law_1_drafts(s, KeepAll(), "int8"), range(6)),
    ),
    "padding starts the table": (
        CacheLayer,
        "append",
        lambda self, keys, values, starts=None: _APPEND(self, keys, values),
        lambda: all_of(lambda s: check_law_1_neighbours(s, KeepAll(), "int8"), range(4)),
    ),
    "a slab keeps its hole": (
        BlockStore,
        "_add_rest",
        lambda self, slab, gone: self._slabs.update({slab: None}),
        lambda: all_of(lambda s: check_law_3_after_eviction(s), range(3)),
    ),
}


def check_law_3_after_eviction(seed: int) -> None:
    layer, part = make("int8", Importance(26, sinks=3)), tokens(60, seed=seed)
    for at in range(0, 60, 5):
        step(layer, cut(part, at, at + 5))
        layer.commit()
        check_law_3_bytes(layer)


def _append_and_seal(layer: CacheLayer, keys: Tensor, values: Tensor, starts: Any) -> None:
    _APPEND(layer, keys, values, starts=starts)
    held, layer.num_open = layer.num_open, 0
    for index, row in enumerate(layer.rows):
        seal(layer, index, row)
    layer.num_open = held


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above find each of these faults; without it, they pass."""
    owner, attribute, fault, check = MUTANTS[name]
    check()
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError)):
        check()
