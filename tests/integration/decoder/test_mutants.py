"""Each law must fail for a decoder that breaks it (T3): a test that cannot fail checks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import qkv.integration.walk as walking
from qkv.integration import loop, sampling, verify
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.walk import Row
from tests.helpers import fails
from tests.integration.decoder.cases import MODES, continued, kv_cache, padded, ragged, related, target

Patch = pytest.MonkeyPatch


def check(cache: str = "dynamic", mode: str = "everything", length: int = 4) -> Callable[[], None]:
    """The law of test_lossless, on three ragged rows."""
    ids, mask = ragged()
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 20, **MODES[mode]}
    plain = SpeculativeDecoder(target(), cache=kv_cache(cache, target()))
    expected = padded(
        [continued(plain, row[real.bool()][None], **options)[0] for row, real in zip(ids, mask, strict=True)]
    )

    def run() -> None:
        decoder = SpeculativeDecoder(target(), source=related(), length=length, cache=kv_cache(cache, target()))
        try:
            found = continued(decoder, ids, mask, **options)
        except Exception as error:
            raise AssertionError from error
        assert found == expected

    return run


def off_by_one_row(patch: Patch) -> None:
    """Reads the logits before each position (mistral.rs#2424)."""
    patch.setattr(loop, "walk", lambda rows, drafts, logits: walking.walk(rows, drafts, logits.roll(1, 1)))


def draft_unverified(patch: Patch) -> None:
    """Emits the first drafted token whatever the target says (lattice#243)."""

    def walk(rows: Any, drafts: Any, logits: Any) -> Any:
        for draft, part in zip(drafts, logits, strict=True):
            if len(draft):
                part[0] = torch.where(torch.arange(part.shape[1]) == draft.tokens[0], 1e4, part[0])
        return walking.walk(rows, drafts, logits)

    patch.setattr(loop, "walk", walk)


def noise_by_step(patch: Patch) -> None:
    """Noise keyed by the number of calls in place of the position."""
    calls: list[int] = []

    def gumbel(seed: int, stream: int, position: int, size: int, device: torch.device) -> Any:
        calls.append(position)
        return original(seed, stream, len(calls), size, device)

    original = sampling.gumbel
    patch.setattr(sampling, "gumbel", gumbel)


def rejected_tokens_stay(patch: Patch) -> None:
    """Keeps the keys of every drafted token."""
    original = verify.Frame.commit
    patch.setattr(verify.Frame, "commit", lambda self, kept: original(self, [self.num_open] * len(kept)))


def shortest_row_for_all(patch: Patch) -> None:
    """Rolls every row back to the one that accepted least (transformers#32165)."""
    original = verify.Frame.commit
    patch.setattr(verify.Frame, "commit", lambda self, kept: original(self, [min(kept)] * len(kept)))


def processors_without_the_draft(patch: Patch) -> None:
    """Penalties that see committed tokens only (sglang#33643)."""
    original = Row.scores
    patch.setattr(Row, "scores", lambda self, logits, drafted: original(self, logits, drafted[:0]))


def positions_of_columns(patch: Patch) -> None:
    """Padding counts as positions."""
    original = verify.Frame._call

    def call(self: Any, tokens: Any, keep_logits: int = 0) -> Any:
        model = self.model
        self.model = lambda *args, position_ids, **rest: model(
            *args, position_ids=position_ids.amax(0, keepdim=True).expand_as(position_ids), **rest
        )
        try:
            return original(self, tokens, keep_logits)
        finally:
            self.model = model

    patch.setattr(verify.Frame, "_call", call)


MUTANTS = {
    mutant.__name__: mutant
    for mutant in (
        off_by_one_row,
        draft_unverified,
        noise_by_step,
        rejected_tokens_stay,
        shortest_row_for_all,
        processors_without_the_draft,
        positions_of_columns,
    )
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_law_catches(name: str, monkeypatch: Patch) -> None:
    law = check()
    law()
    MUTANTS[name](monkeypatch)
    assert fails(law)


@pytest.mark.parametrize("cache", ["int4", "evict"])
def test_the_law_catches_blocks_beyond_the_room(cache: str, monkeypatch: Patch) -> None:
    law = check(cache, "sampled", length=8)
    law()
    monkeypatch.setattr(verify.Frame, "room", lambda self: 2**31)
    assert fails(law)
