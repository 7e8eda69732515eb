"""Perplexity of a causal model on a text, window by window."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qkv.errors import QkvError
from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache
from qkv.progress import Progress

CHUNK = 64
"""Tokens a step when a window is fed through a cache."""


@dataclass(frozen=True)
class Perplexity:
    """``value`` is exp of the mean negative log likelihood over ``num_tokens`` predicted tokens."""

    value: float
    num_tokens: int
    num_windows: int
    window: int
    seconds: float

    def __str__(self) -> str:
        speed = self.num_tokens / self.seconds if self.seconds else 0.0
        return (
            f"perplexity {self.value:.3f} on {self.num_tokens:,} tokens "
            f"({self.num_windows} windows of {self.window} tokens, {speed:,.0f} tokens/s)"
        )


@torch.no_grad()
def perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    window: int = 512,
    num_windows: int | None = None,
    cache: Mapping[str, Any] | None = None,
) -> Perplexity:
    """Perplexity of ``model`` on ``text``.

    The text is tokenized as a whole and cut into windows that do not overlap; in each, every token but the
    first is predicted from those before it. Log likelihoods are summed in float64.

    Args:
        model: a transformers causal model.
        tokenizer: its tokenizer.
        text: any text of two tokens or more.
        window: tokens a window.
        num_windows: how many windows from the start; all of them by default, a short last one included.
        cache: arguments of a :class:`qkv.KVCache`; each window is then fed through one, 64 tokens at a time,
            so that what it stores is what is read. None reads the window at once without a cache.

    Raises:
        QkvError: a text or window too short to predict anything.
    """
    if window < 2:
        raise QkvError(f"a window of {window} tokens predicts nothing; take 2 or more")
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    windows = [part for part in ids.split(window) if len(part) > 1][:num_windows]
    if not windows:
        raise QkvError(f"the text has {len(ids)} tokens; perplexity needs 2 or more")
    total, count, start = 0.0, 0, time.perf_counter()
    with Progress("perplexity", len(windows)) as progress:
        for part in windows:
            total += negative_log_likelihood(model, part.to(model.device), cache)
            count += len(part) - 1
            progress.advance(f"{math.exp(total / count):.2f}")
    return Perplexity(math.exp(total / count), count, len(windows), window, time.perf_counter() - start)


def negative_log_likelihood(model: Any, ids: torch.Tensor, cache: Mapping[str, Any] | None = None) -> float:
    """Summed over the tokens of ``ids`` ``[tokens]`` after the first."""
    if not cache:
        return _loss(model(ids[None], use_cache=False).logits[0, :-1], ids[1:])
    held = KVCache(model.config, **cache).attach(model)
    try:
        total = 0.0
        for start in range(0, len(ids) - 1, CHUNK):
            chunk, targets = ids[start : start + CHUNK], ids[start + 1 : start + CHUNK + 1]
            logits = model(chunk[None], **{cache_argument(model): held}).logits[0, : len(targets)]
            total += _loss(logits, targets)
        return total
    finally:
        held.detach()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> float:
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return float(losses.double().sum())
