"""What the decoder's tests share: models, caches, modes, sources that mean harm."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from qkv.cache.retention import Importance, Window
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.draft import Draft
from qkv.integration.hf_cache import KVCache
from qkv.integration.length import Outcome
from qkv.integration.walk import Row
from tests.helpers import prompt, tiny

CACHES: Final[dict[str, dict[str, Any] | None]] = {
    "dynamic": None,
    "int4": {"keys": "int4", "values": "int4", "block_size": 8, "residual": 5},
    "int8": {"keys": "int8", "values": "int8", "block_size": 8, "residual": 4},
    "window": {"keys": "int8", "values": "int8", "block_size": 4, "residual": 4, "retain": Window(16, sinks=2)},
    "evict": {"keys": "exact", "values": "exact", "block_size": 4, "residual": 4, "retain": Importance(budget=24)},
}


class Ends:
    """A stopping criterion of two tokens, which knows nothing of blocks."""

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return ids[:, -2:].sum(1) % 9 == 0


MODES: Final[dict[str, dict[str, Any]]] = {
    "stopped": {"do_sample": True, "temperature": 0.9, "top_k": 0, "stopping_criteria": [Ends()]},
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 0},
    "everything": {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "min_new_tokens": 3,
        "eos_token_id": [5, 9],
    },
}


@cache
def target(family: str = "llama") -> Any:
    """In float64, so that no rounding can turn a choice."""
    return tiny(family, dtype=torch.float64)


@cache
def related(family: str = "llama") -> Any:
    """A draft that is often right."""
    return noisy(target(family), 0.02)


@cache
def unrelated() -> Any:
    """A draft that is hardly ever right."""
    return tiny("llama", seed=1, num_hidden_layers=1, dtype=torch.float64)


def noisy(model: Any, amount: float) -> Any:
    """A copy with noise on its weights."""
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    for parameter in found.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += amount * noise.to(parameter.dtype)
    return found


def kv_cache(name: str, model: Any) -> KVCache | None:
    """A cache of :data:`CACHES`."""
    settings = CACHES[name]
    return None if settings is None else KVCache(model.config, **settings)


def ragged() -> tuple[Tensor, Tensor]:
    """Three prompts of 21, 15 and 8 tokens, padded on the left, and their mask."""
    ids = prompt(21, batch=3)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    mask[2, :13] = 0
    return ids * mask, mask


def continued(decoder: SpeculativeDecoder, ids: Tensor, mask: Tensor | None = None, **options: Any) -> list[list[int]]:
    """New tokens of each row, padding included."""
    found: list[list[int]] = decoder.generate(ids, mask, pad_token_id=0, **options)[:, ids.shape[1] :].tolist()
    return found


def padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows of one length, filled with 0."""
    longest = max(len(row) for row in rows)
    return [[*row, *[0] * (longest - len(row))] for row in rows]


class Adversary:
    """Random tokens, one-token drafts, ends of sequence, ids that no model has, more than was asked for."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def begin(self, rows: Sequence[Row]) -> None:
        pass

    def draft(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Draft]:
        return [Draft.chain(self._tokens(limit)) for limit in limits]

    def select(self, rows: Sequence[int]) -> None:
        pass

    def _tokens(self, limit: int) -> list[int]:
        kind = self._random.randrange(5)
        if kind == 0:
            return []
        if kind == 1:
            return [self._random.choice([5, 9])]
        if kind == 2:
            return [-1, 64, 10**9]
        return [self._random.randrange(64) for _ in range(limit + 3)]


class Moody:
    """A policy that asks for anything, and drops tokens after looking at them."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def budget(self, limit: int) -> int:
        return self._random.choice([0, 1, limit, 2 * limit + 5])

    def keep(self, draft: Draft) -> int:
        kept = sum(int(token) % 3 > 0 for token in draft.tokens)
        return self._random.choice([kept, len(draft), -1])

    def update(self, outcome: Outcome) -> None:
        assert all(accepted <= drafted for accepted, drafted in zip(outcome.accepted, outcome.drafts, strict=True))
