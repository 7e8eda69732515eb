"""A step reads from the device once: every other look of the host at a computed number would wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkv.integration import loop, sampling, walk
from qkv.integration.decoder import SpeculativeDecoder
from tests.helpers import prompt, tiny
from tests.integration.decoder.cases import MODES, kv_cache, ragged

LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
"""Operations whose result, or its size, the host needs."""


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the host's looks at anything that was computed from a model's weights, and names them.

    There is no device here: what comes of the weights is what would lie there.
    """

    def __init__(self, *models: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        for model in models:
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.is_computed = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        computed = any(_is_computed(leaf) for leaf in tree_leaves((args, kwargs)))
        if computed and (
            name.startswith(LOOKS) or (name == "index" and any(_is_bool(leaf) for leaf in tree_leaves(args)))
        ):
            self.found.append(name)
        result = func(*args, **(kwargs or {}))
        if computed:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    leaf.is_computed = True  # type: ignore[attr-defined]
                    if leaf._base is not None:  # written through a view
                        leaf._base.is_computed = True  # type: ignore[attr-defined]
        return result


def _is_computed(value: Any) -> bool:
    return isinstance(value, Tensor) and getattr(value, "is_computed", False)


def _is_bool(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's way on a device, where it is not cheap to look at numbers one by one."""
    for module in (walk, loop, sampling):
        monkeypatch.setattr(module, "reads_are_cheap", lambda device: False)


def reads(monkeypatch: pytest.MonkeyPatch, cache: str, mode: str, rows: int, **options: Any) -> tuple[list[str], int]:
    """What was read in a generation, and its steps."""
    model, draft = tiny("llama"), tiny("llama", seed=1)
    source = options.pop("source")
    decoder = SpeculativeDecoder(
        model, source=draft if source == "model" else source, cache=kv_cache(cache, model), **options
    )
    ids, mask = ragged() if rows == 3 else (prompt(21), None)
    with Reads(model, draft) as counted, monkeypatch.context() as patch:
        for name in ("tolist", "numpy"):
            patch.setattr(torch.Tensor, name, _counting(name, getattr(torch.Tensor, name), counted.found))
        decoder.generate(ids, mask, max_new_tokens=10, seed=3, pad_token_id=0, **MODES[mode])
    return counted.found, decoder.stats.steps


def _counting(name: str, plain: Any, found: list[str]) -> Any:
    def read(self: Tensor, *args: Any) -> Any:
        if _is_computed(self):
            found.append(name)
        return plain(self, *args)

    return read


@pytest.mark.parametrize(("rows", "mode"), [(1, "greedy"), (1, "everything"), (3, "greedy"), (3, "sampled")])
@pytest.mark.parametrize("source", ["none", "lookup", "model"])
@pytest.mark.parametrize("cache", ["dynamic", "int8"])
def test_one_read_a_step(
    device: None, monkeypatch: pytest.MonkeyPatch, cache: str, source: str, mode: str, rows: int
) -> None:
    found, steps = reads(monkeypatch, cache, mode, rows, source=source, length=4)
    assert found == ["tolist"] * steps


def test_more_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the walk looks at one choice after the other."""
    model = tiny("llama")
    found, steps = reads(monkeypatch, "dynamic", "sampled", 1, source=model, length=4)
    assert set(found) == {"numpy"} and len(found) > steps
