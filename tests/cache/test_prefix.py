"""Shared prefixes: found by their tokens, never copied, never changed, within their bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from qkv.cache.codec import Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.prefix import PrefixCache
from qkv.cache.retention import Importance, KeepAll, Retention, Window
from qkv.cache.settings import LayerSettings
from qkv.errors import QkvError

SIZE = 4


class Model:
    """Stands for a cache of two layers: keys are a function of the token and all before it."""

    def __init__(self, retain: Retention | None = None, codec: str = "exact", name: str = "m") -> None:
        self.settings = LayerSettings(
            Codec(codec), Codec(codec), block_size=SIZE, residual=3, retain=retain or KeepAll()
        )
        self.name = name
        self.block_layers = [CacheLayer(self.settings) for _ in range(2)]
        self.layers = self.block_layers

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        return (("model", self.name), ("layers", str(self.settings)))

    def empty(self) -> Model:
        other = Model(name=self.name)
        other.settings = self.settings
        other.block_layers = other.layers = [CacheLayer(self.settings) for _ in range(2)]
        return other

    def run(self, ids: list[int]) -> None:
        """Append the tokens that are not there yet, a few at a time."""
        for layer in self.block_layers:
            while len(layer) < len(ids):
                part = ids[len(layer) : len(layer) + 7]
                layer.append(*(vectors(ids[: len(layer) + len(part)])[:, :, -len(part) :] for _ in range(2)))
                layer.commit()

    def check(self, ids: list[int]) -> None:
        for layer in self.block_layers:
            layer.append(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
            keys, _ = layer.dense()
            layer.discard()
            assert torch.equal(keys[:, :, :-1], vectors(ids))

    def reset(self) -> None:
        for layer in self.block_layers:
            layer.reset()


def vectors(ids: list[int]) -> torch.Tensor:
    sums = torch.tensor(ids, dtype=torch.float32).cumsum(0)
    return torch.stack((sums, sums % 17, sums % 29, sums % 5), -1)[None, None]


def test_a_match_shares_blocks_and_leaves_a_token_to_run() -> None:
    shared = PrefixCache("1MB", make=Model)
    ids = list(range(40))
    cache, matched = shared.lookup(ids)
    assert matched == 0
    cache.run(ids)
    assert shared.store(ids, cache) == 40
    for asked, expected in (
        (ids, 36),
        (ids[:37], 36),
        (ids[:36], 32),
        (ids[:22] + [9] * 9, 20),
        ([5, *ids], 0),
    ):
        hit, matched = shared.lookup(asked)
        assert matched == expected
        assert [len(layer) for layer in hit.block_layers] == [expected] * 2
        if matched:
            assert hit.block_layers[0].rows[0].blocks[0] is cache.block_layers[0].rows[0].blocks[0]
        hit.run(asked)
        hit.check(asked)
    cache.check(ids)


def test_key_fields_are_kept_apart() -> None:
    shared, ids = PrefixCache("1MB"), list(range(20))
    cache = Model()
    cache.run(ids)
    shared.store(ids, cache, salt="a")
    assert shared.lookup(ids, Model(), salt="a")[1] == 16
    assert shared.lookup(ids, Model(), salt="b")[1] == 0
    assert shared.lookup(ids, Model(name="other"), salt="a")[1] == 0
    assert shared.lookup(ids, Model(codec="int8"), salt="a")[1] == 0
    assert shared.lookup(ids, Model(Window(50)), salt="a")[1] == 0


def test_min_match_and_nothing_known() -> None:
    shared, ids = PrefixCache("1MB", min_match=12), list(range(10))
    assert shared.lookup(ids) == (None, 0)
    cache = Model()
    cache.run(ids)
    shared.store(ids, cache)
    assert shared.lookup(ids)[1] == 0
    with pytest.raises(QkvError, match="empty cache"):
        shared.lookup(ids, cache)


@pytest.mark.parametrize("retain", [Window(10, sinks=2), Importance(24, sinks=2)], ids=["window", "importance"])
def test_blocks_made_after_an_eviction_are_not_shared(retain: Retention) -> None:
    shared, ids = PrefixCache("1MB"), list(range(60))
    cache = Model(retain)
    cache.run(ids[:9])
    assert shared.store(ids[:9], cache) == 8
    cache.run(ids)
    assert shared.store(ids, cache) <= 24
    hit, matched = shared.lookup(ids, Model(retain))
    assert 0 < matched <= 24
    sinks = hit.block_layers[0].rows[0].sinks
    assert sinks is not None and sinks.num_tokens == 2


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_eviction_takes_leaves_by_policy_and_never_what_is_in_use(policy: Any) -> None:
    block = 2 * 2 * SIZE * 4 * 4
    shared = PrefixCache(6 * block, policy=policy, make=Model)
    first, second, third = [1] * 12, [2] * 12, [3] * 12
    for ids in (first, second):
        cache, _ = shared.lookup(ids)
        cache.run(ids)
        assert shared.store(ids, cache) == 12
        del cache
    for _ in range(3):
        shared.lookup([*first, 0])
    shared.lookup([*second, 0])
    live, matched = shared.lookup([*(first if policy == "lru" else second), 0])
    assert matched == 12
    cache = Model()
    cache.run(third)
    shared.store(third, cache)
    assert shared.nbytes <= 6 * block
    kept = {name: shared.lookup([*ids, 0])[1] for name, ids in (("first", first), ("second", second))}
    assert kept["first"] == 12 if policy == "lru" else kept["second"] == 12
    live.run([*(first if policy == "lru" else second), 0])
    live.check([*(first if policy == "lru" else second), 0])


def test_lookup_costs_the_match_not_the_entries() -> None:
    shared = PrefixCache("100MB", make=Model)
    cache = Model()
    for i in range(300):
        ids = [i] * 5
        cache.reset()
        cache.run(ids)
        shared.store(ids, cache)
    calls = 0

    class Counting(dict[Any, Any]):
        def get(self, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            return super().get(*args)

    for root in shared._roots.values():
        root.children = Counting(root.children)
    assert shared.lookup([7] * 9)[1] == 4
    assert calls == 1


def test_soak() -> None:
    """A thousand requests over 64 prefixes, with forks, drops and evictions under a byte budget."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(50) for _ in range(rng.randrange(8, 40))] for _ in range(64)]
    shared, live = PrefixCache(40_000, policy="lru", make=Model), list[tuple[Model, list[int]]]()
    for turn in range(1000):
        ids = rng.choice(prefixes) + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        cache, matched = shared.lookup(ids)
        assert matched < len(ids)
        cache.run(ids)
        if rng.random() < 0.7:
            shared.store(ids, cache)
        if rng.random() < 0.3:
            other = cache.empty()
            other.block_layers = other.layers = [layer.fork() for layer in cache.block_layers]
            longer = [*ids, *(rng.randrange(50) for _ in range(9))]
            other.run(longer)
            live.append((other, longer))
        live.append((cache, ids))
        while len(live) > 12:
            live.pop(rng.randrange(len(live)))
        if turn % 25 == 0:
            for held, tokens in live:
                held.check(tokens)
        assert shared.nbytes <= 40_000
    assert shared.hits > 300
    del cache, other, held
    check_conserved(shared, [layer for cache, _ in live for layer in cache.block_layers])
    live.clear()

    check_conserved(shared, [])


def check_conserved(shared: PrefixCache, layers: list[CacheLayer]) -> None:
    """Held bytes equal those of the live tables and the tree; references equal their entries."""
    entries = [block for node in shared._nodes() for block in node]
    entries += [block for layer in layers for row in layer.rows for block in row]
    stores = {block.store for block in entries}
    assert sum(s.references for s in stores) == len(entries)
    assert sum(s.nbytes for s in stores) == sum(b.nbytes for b in {id(b): b for b in entries}.values())


def test_bad_arguments() -> None:
    for wrong in (
        {"max_bytes": "many"},
        {"max_bytes": 5, "policy": "fifo"},
        {"max_bytes": 5, "min_match": 0},
    ):
        with pytest.raises(QkvError):
            PrefixCache(**wrong)  # type: ignore[arg-type]
    with pytest.raises(QkvError, match="one prompt at a time"):
        PrefixCache(5).lookup(torch.zeros(2, 3))
