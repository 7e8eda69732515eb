"""Blocks in host memory: the same tokens, and nothing is ever computed there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.cache import blocks, view
from qkv.cache.retention import Importance, Window
from qkv.integration.hf_cache import KVCache
from tests.integration.test_hf_cache import INT8, MODELS, forward, generate, ids, made

ELSEWHERE = torch.device("meta")
MOVES = {"__getitem__", "cat", "index_select", "contiguous", "clone", "untyped_storage", "numel", "element_size", "dim"}
READS = {"shape", "dtype", "is_meta", "nbytes", "layout"}


class Elsewhere(Tensor):
    """A tensor on another device, as far as one processor can tell: it may be moved, and anything else fails."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name == "__get__":
            attribute = function.__self__.__name__
            if attribute == "device":
                return ELSEWHERE
            assert attribute in READS, f"{attribute} of an offloaded tensor"
        else:
            assert name in MOVES, f"{name} of an offloaded tensor"
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def fetched(tensors: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
    kind = Elsewhere if device == ELSEWHERE else Tensor
    return {name: tensor.as_subclass(kind) for name, tensor in tensors.items()}


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_KERNELS", "reference")
    monkeypatch.setattr(blocks, "HOST", ELSEWHERE)
    for module in (blocks, view):
        monkeypatch.setattr(module, "fetched", fetched)


def stored(cache: KVCache) -> list[Tensor]:
    slabs = [block.slab for layer in cache.block_layers for row in layer.rows for block in row.blocks]
    return [tensor for slab in slabs for tensor in slab.tensors.values()]


CASES: dict[str, dict[str, Any]] = {
    "int8": {},
    "exact": {"keys": "exact", "values": "exact"},
    "window": {"retain": Window(40, sinks=4, summary=8), "residual": 0},
    "importance": {"retain": Importance(64, sinks=4)},
}


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_offloaded_blocks_are_only_moved_and_give_the_same_tokens(case: str, attached: bool) -> None:
    model, options = MODELS["llama"](), {**INT8, **CASES[case]}
    if not attached and "retain" in CASES[case]:
        pytest.skip("its policy needs our attention")
    plain, offloaded = (made(model, attached, **{**options, "offload": offload}) for offload in (False, True))
    assert torch.equal(generate(model, ids(90), plain, 40), generate(model, ids(90), offloaded, 40))
    assert stored(offloaded) and all(isinstance(tensor, Elsewhere) for tensor in stored(offloaded))
    assert not any(isinstance(tensor, Elsewhere) for tensor in stored(plain))
    assert all(type(v.tail.keys) is Tensor for v in offloaded.block_layers if v.tail is not None)
    assert offloaded.nbytes == plain.nbytes
    if "retain" not in CASES[case]:
        for cache in (plain, offloaded):
            cache.crop(-40)
        assert torch.equal(forward(model, ids(5), plain), forward(model, ids(5), offloaded))


@pytest.mark.usefixtures("two_devices")
def test_layers_go_and_come_back_under_caches_that_share_them() -> None:
    model = MODELS["llama"]()
    cache = made(model, True, **INT8)
    generate(model, ids(90), cache, 10)
    other = cache.fork()
    expected = forward(model, ids(3), cache.fork())
    for layer in cache.layers:
        layer.offload()
    assert all(isinstance(tensor, Elsewhere) for tensor in stored(other))
    assert torch.equal(forward(model, ids(3), other), expected)
    for layer in cache.layers:
        layer.prefetch()
    assert not any(isinstance(tensor, Elsewhere) for tensor in stored(other))
    assert torch.equal(forward(model, ids(3), cache), expected)


def undone(store: blocks.BlockStore, block: blocks.Block) -> Any:
    return blocks.decode_slots(store.layout, block.tensors())


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("way", ["on", "decode"])
def test_a_read_that_does_not_fetch_fails(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    mutants: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "on": (view.Run, "on", lambda run, device: run),
        "decode": (blocks.BlockStore, "decode", undone),
    }
    monkeypatch.setattr(*mutants[way])
    cache = made(model, True, **INT8, offload=True)
    with pytest.raises(AssertionError, match="offloaded tensor"):
        generate(model, ids(90), cache, 10)
        cache.crop(-60)
