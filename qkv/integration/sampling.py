"""How a token is chosen: greedy, coupled to noise keyed by position, or by the rejection rule. Pure functions."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

CHOICE: Final = 0
COIN: Final = 1
RESIDUAL: Final = 2
DRAFT: Final = 3
"""Streams of noise. The coupled rule draws drafts and choices from the same one; the rejection rule must not:
sharing noise between a draft and its coin biases the output."""

_MASK: Final = 2**64 - 1


def key_of(seed: int, stream: int, position: int) -> int:
    """A 63-bit key that changes in half its bits with any of the three (SplitMix64, Steele et al. 2014)."""
    key = seed & _MASK
    for part in (stream, position):
        key = (key + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key >> 1


def gumbel(seed: int, stream: int, position: int, size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise, float32 ``[size]``: a function of the arguments alone."""
    generator = torch.Generator(device).manual_seed(key_of(seed, stream, position))
    exponential = torch.empty(size, device=device).exponential_(generator=generator)
    return -exponential.clamp_min(torch.finfo(torch.float32).tiny).log()


def coin(seed: int, position: int, device: torch.device) -> Tensor:
    """A uniform number in ``[0, 1)``, float32 ``[]``."""
    generator = torch.Generator(device).manual_seed(key_of(seed, COIN, position))
    return torch.rand((), generator=generator, device=device)


def reads_are_cheap(device: torch.device) -> bool:
    """Whether the host may look at single numbers: elsewhere each look waits for the device."""
    return device.type == "cpu"


def largest(scores: Tensor) -> Tensor:
    """Index of the largest of ``[..., vocabulary]``, of equal ones the first: int64 ``[...]``.

    On a CPU numpy finds it: torch takes 5 times as long in float32, 25 times in bfloat16, which for the 16 tokens of
    a verify call is 3% of a step of SmolLM2.
    """
    if not reads_are_cheap(scores.device):
        return scores.argmax(-1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.as_tensor(wide.detach().numpy().argmax(-1))


def choose(scores: Tensor, seed: int | None, position: int, stream: int = CHOICE) -> Tensor:
    """The token at a position: argmax of scores plus noise, which is a sample of their softmax.

    Whoever uses the same noise on similar scores mostly gets the same token, so that a draft is accepted
    exactly when it guessed the target's choice (Daliri, Musco, Suresh, arXiv 2408.07978).

    Args:
        scores: processed logits ``[vocabulary]``; ``-inf`` where forbidden.
        seed: of the noise; None chooses greedily.

    Returns:
        int64 ``[]``.
    """
    if seed is not None:
        scores = scores + gumbel(seed, stream, position, scores.shape[-1], scores.device).to(scores.dtype)
    return largest(scores)


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """Chance to accept each token drawn from ``q`` for a target ``p``: ``min(1, p / q)``, ``[..., vocabulary]``."""
    return torch.where(q > 0, p / q.clamp_min(torch.finfo(q.dtype).tiny), torch.ones_like(p)).clamp_max(1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Distribution after a rejection, ``(p - q)+`` normalised; ``p`` itself where nothing is left of it."""
    left = (p - q).clamp_min(0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp_min(torch.finfo(p.dtype).tiny), p)


def reject_or_keep(scores: Tensor, token: Tensor, log_q: Tensor, seed: int, position: int) -> Tensor:
    """The drafted token, or one of the residual: a sample of the scores' softmax (Leviathan et al., arXiv 2211.17192).

    Args:
        scores: the target's processed logits ``[vocabulary]``.
        token: int64 ``[]``, drawn from ``log_q`` with noise of another stream.
        log_q: ``[vocabulary]``.

    Returns:
        int64 ``[]``; the drafted token where, and only where, it was accepted.
    """
    p, q = scores.softmax(-1), log_q.to(scores.dtype).exp()
    accepted = coin(seed, position, scores.device) < accept_probability(p, q)[token]
    other = choose(residual(p, q).log(), seed, position, RESIDUAL)
    return torch.where(accepted, token, other)
