"""Whole loops follow the target's distribution: exact joint of two tokens by enumeration, Pearson chi-square."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.integration.decoder import SpeculativeDecoder
from tests.helpers import tiny

SIZE, TRIALS = 5, 1500
LIMIT = 73.0
"""Chi-square of 24 degrees of freedom is above this with a chance of 1e-6; 1,500 trials detect a total
variation of 0.15 with power 0.999. The draft is 0.4 away from the target."""
PROMPT = torch.tensor([[1, 3, 2]])


@cache
def models() -> tuple[Any, Any]:
    target, draft = (tiny("llama", seed=seed, vocab_size=SIZE, initializer_range=0.5) for seed in (0, 3))
    return target, draft


@cache
def joint(which: int, temperature: float) -> Tensor:
    """Exact probabilities of the next two tokens, ``[SIZE, SIZE]``."""
    model = models()[which]
    with torch.no_grad():
        first = (model(PROMPT).logits[0, -1] / temperature).softmax(-1)
        longer = torch.cat([PROMPT.repeat(SIZE, 1), torch.arange(SIZE)[:, None]], 1)
        second = (model(longer).logits[:, -1] / temperature).softmax(-1)
    found: Tensor = (first[:, None] * second).double()
    return found


def drawn(decoder: SpeculativeDecoder, trials: int, **options: Any) -> Tensor:
    """Counts of the two tokens after the prompt, over all seeds at once: a batch with a seed each row."""
    counts = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for start in range(0, trials, 250):
        found = decoder.generate(
            PROMPT.repeat(250, 1), max_new_tokens=3, do_sample=True, seed=range(start, start + 250), **options
        )
        for first, second in found[:, 3:5].tolist():
            counts[first, second] += 1
    return counts


def chi_square(counts: Tensor, p: Tensor) -> float:
    expected = p * counts.sum()
    big = expected >= 5
    rare, rare_expected = counts[~big].sum(), expected[~big].sum()
    found = ((counts - expected)[big] ** 2 / expected[big]).sum()
    return float(found + (rare - rare_expected) ** 2 / rare_expected.clamp_min(5))


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_target(accept: str, temperature: float) -> None:
    """S07 (transformers#32867, #28166, mistral.rs#2424)."""
    model, draft = models()
    decoder = SpeculativeDecoder(model, source=draft, length=2, accept=accept)
    counts = drawn(decoder, TRIALS, temperature=temperature, top_k=0)
    assert 0 < decoder.stats.acceptance < 1
    assert chi_square(counts, joint(0, temperature)) < LIMIT


def test_the_drafts_own_distribution_would_be_caught() -> None:
    counts = drawn(SpeculativeDecoder(models()[1]), 500, top_k=0)
    assert chi_square(counts, joint(0, 1.0)) > LIMIT


def test_another_temperature_would_be_caught() -> None:
    counts = drawn(SpeculativeDecoder(models()[0]), TRIALS, top_k=0, temperature=1.4)
    assert chi_square(counts, joint(0, 1.0)) > LIMIT
