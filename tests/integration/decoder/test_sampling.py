"""The rules by themselves: analytic where they can be enumerated, chi-square where they draw."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qkv.integration.sampling import (
    CHOICE,
    COIN,
    DRAFT,
    RESIDUAL,
    accept_probability,
    choose,
    gumbel,
    key_of,
    largest,
    reject_or_keep,
    residual,
)

CPU = torch.device("cpu")
P = torch.tensor([0.1, 0.45, 0.2, 0.25], dtype=torch.float64)
Q = torch.tensor([0.6, 0.02, 0.13, 0.25], dtype=torch.float64)


def test_noise_is_a_function_of_seed_stream_and_position() -> None:
    keys = {key_of(*each) for each in itertools.product((0, 1, 2**63 - 1), (CHOICE, COIN, RESIDUAL, DRAFT), range(50))}
    assert len(keys) == 3 * 4 * 50 and all(0 <= key < 2**63 for key in keys)
    assert torch.equal(gumbel(3, 0, 7, 64, CPU), gumbel(3, 0, 7, 64, CPU))
    state = torch.get_rng_state()
    gumbel(3, 0, 7, 64, CPU)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_largest_is_that_of_torch(dtype: torch.dtype) -> None:
    scores = torch.randn(5, 7, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[1] = scores[1].round()  # ties
    scores[2, :, 50:] = -torch.inf
    scores[3, 2] = -torch.inf
    scores[4, 1, 100] = torch.nan
    assert torch.equal(largest(scores), scores.argmax(-1))
    assert torch.equal(largest(scores[0, 0]), scores[0, 0].argmax(-1))


def chi_square(counts: Tensor, p: Tensor) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_choice_is_a_sample() -> None:
    """20,000 positions, 4 cells: detects a total variation of 0.03; false alarm below 1e-6 at 31."""
    logits = P.log() + 5
    counts = torch.bincount(torch.tensor([int(choose(logits, 0, t)) for t in range(20_000)]), minlength=4)
    assert chi_square(counts.double(), P) < 31


@pytest.mark.parametrize("q", [Q, P, torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)])
def test_accept_and_residual_give_back_the_target(q: Tensor) -> None:
    """T0: the exact distribution of what is emitted, for a draft from any q."""
    accepted = q * accept_probability(P, q)
    emitted = accepted + (1 - accepted.sum()) * residual(P, q)
    assert torch.allclose(emitted, P, atol=1e-12)
    assert not residual(P, P).isnan().any()


@pytest.mark.parametrize("size", [2, 4, 6])
def test_two_drafted_tokens_give_back_the_target(size: int) -> None:
    """T0: every string of two drafts, over contexts with distributions of their own."""
    generator = torch.Generator().manual_seed(size)
    p, q = (torch.rand(size + 1, size, generator=generator, dtype=torch.float64).softmax(-1) ** 3 for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    found = torch.zeros(size, size, dtype=torch.float64)
    first, last = accept_probability(p[size], q[size]), residual(p[size], q[size])
    for x in range(size):
        second = q[x] * accept_probability(p[x], q[x])
        found[x] += q[size, x] * first[x] * (second + (1 - second.sum()) * residual(p[x], q[x]))
        found[x] += (1 - (q[size] * first).sum()) * last[x] * p[x]
    assert torch.allclose(found, p[size][:, None] * p[:size], atol=1e-12)


def rejected(trials: int, draft_stream: int = DRAFT) -> Tensor:
    """Counts of what the rejection rule emits."""
    found = []
    for seed in range(trials):
        token = choose(Q.log(), seed, 0, draft_stream)
        found.append(int(reject_or_keep(P.log(), token, Q.log(), seed, 0)))
    return torch.bincount(torch.tensor(found), minlength=4).double()


def test_the_rejection_rule_samples_the_target() -> None:
    assert chi_square(rejected(10_000), P) < 31


def test_one_noise_for_draft_and_residual_would_be_caught() -> None:
    assert chi_square(rejected(10_000, RESIDUAL), P) > 31
