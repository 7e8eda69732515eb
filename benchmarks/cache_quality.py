"""What a cache's settings cost in perplexity: texts fed through it in chunks, so that it is truly read.

    python benchmarks/cache_quality.py MODEL_DIR WIKITEXT_FILE [--tokens 2048] [--only codecs|retention|far]

Every number is to be read against the first row of its table, which is the exact cache in the same run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.cache.retention import Importance, RandomBlocks, Retention, Window
from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache

CHUNK = 64
LATER = 3000
"""Where the texts of the retention tables begin: WikiText-2's first article repeats its lead to the word in its
body, so that every policy that halves the tokens loses what is copied."""


@dataclass(frozen=True)
class Loss:
    """Perplexity over the tokens counted, and what the cache held at the end."""

    perplexity: float
    cache: KVCache


@torch.no_grad()
def perplexity(
    model: Any, ids: Tensor, cache: KVCache, *, count_from: int, first_position: int = 0, attach: bool = True
) -> Loss:
    """Teacher-forced perplexity of ``ids [1, tokens]`` from token ``count_from`` on, in chunks of 64."""
    if attach:
        cache.attach(model)
    total, counted = 0.0, 0
    try:
        for start in range(0, ids.shape[1] - 1, CHUNK):
            part = ids[:, start : start + CHUNK]
            positions = torch.arange(start, start + part.shape[1])[None] + first_position
            logits = model(part, position_ids=positions, **{cache_argument(model): cache}).logits[0].float()
            targets = ids[0, start + 1 : start + 1 + part.shape[1]]
            logits = logits[: len(targets)]
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            losses = losses[max(count_from - start - 1, 0) :]
            total, counted = total + float(losses.sum()), counted + len(losses)
    finally:
        cache.detach()
    return Loss(math.exp(total / counted), cache)


CODECS: dict[str, dict[str, Any]] = {
    "exact": dict(keys="exact", values="exact"),
    "int8 / int8": dict(keys="int8", values="int8"),
    "int8 / int4": dict(keys="int8", values="int4"),
    "int4 / int4": dict(keys="int4", values="int4"),
    "int4 / int4, groups of 32": dict(keys="int4:g32", values="int4:g32"),
    "nf4 / nf4": dict(keys="nf4", values="nf4"),
    "int4 token / int4 token": dict(keys="int4:token", values="int4"),
    "int4 / int2": dict(keys="int4", values="int2"),
    "int2 / int2": dict(keys="int2", values="int2"),
    "int2 / int2, residual 128": dict(keys="int2", values="int2", residual=128),
}


def policies(budget: int) -> dict[str, Retention | None]:
    """What is compared under one budget of tokens a row and layer."""
    return {
        "keep all": None,
        "window + 4 sinks": Window(budget - 4, sinks=4),
        "window + 4 sinks + summary": Window(budget - 4 - budget // 4, sinks=4, summary=budget // 4),
        "importance (published weights)": Importance(budget),
        "importance, mass alone": Importance(budget, frequency=1.0, recency=0.0, concentration=0.0),
        "importance, pyramid": Importance(budget, layers="pyramid"),
        **{f"random blocks, seed {seed}": RandomBlocks(budget, seed=seed) for seed in (1, 2, 3)},
    }


def table(title: str, rows: Iterable[tuple[str, Loss]]) -> None:
    """Print perplexities, each against the first."""
    print(f"\n{title}\n{'':34} {'ppl':>9} {'change':>9} {'held':>6} {'MB':>8}", flush=True)
    base = None
    for name, loss in rows:
        base = base or loss.perplexity
        print(
            f"{name:34} {loss.perplexity:9.4f} {loss.perplexity / base - 1:+9.3%} {loss.cache.num_held:6} "
            f"{loss.cache.nbytes / 1e6:8.3f}",
            flush=True,
        )


def technical_text() -> str:
    """A long technical text every Python carries: the language reference's topics."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in ("compound", "class", "types", "assignment", "typesmapping"))


def retrieval_ids(text: Tensor) -> tuple[Tensor, int]:
    """768 tokens of text with a passage of 128 at token 320, and that passage again at the end."""
    passage = text[:, 2000:2128]
    ids = torch.cat((text[:, :320], passage, text[:, 320:768], passage), 1)
    return ids, ids.shape[1] - 128


def run(model: Any, texts: dict[str, Tensor], tokens: int, only: str | None) -> None:
    """All tables."""
    config = model.config
    for name, ids in texts.items():
        part = ids[:, :tokens]
        if only in (None, "codecs"):
            rows = ((n, perplexity(model, part, KVCache(config, **kw), count_from=256)) for n, kw in CODECS.items())
            table(f"codecs, {name}, {tokens} tokens, counted from 256", rows)
        if only in (None, "retention"):
            exact: dict[str, Any] = dict(keys="exact", values="exact", block_size=16, residual=16)
            for budget in (512, 256):
                half = ids[:, LATER : LATER + 1024]
                rows = (
                    (n, perplexity(model, half, KVCache(config, retain=p, **exact), count_from=budget))
                    for n, p in policies(budget).items()
                )
                table(f"retention, {name}, {budget} of 1024 tokens, counted from {budget}", rows)
            again, count_from = retrieval_ids(ids[:, LATER:])
            rows = (
                (n, perplexity(model, again, KVCache(config, retain=p, **exact), count_from=count_from))
                for n, p in policies(256).items()
            )
            table(f"retrieval, {name}: second copy of a passage, 256 tokens held", rows)
    if only in (None, "far"):
        far(model, next(iter(texts.values())))


def far(model: Any, ids: Tensor) -> None:
    """Window 256 + 4 sinks near the start and at position 30,000, the same text before both."""
    part = ids[:, :1536]
    rows = []
    for start in (30_000 % 1536 + 1536, 30_000):
        retain = Window(256, sinks=4, rerotate=True)
        cache = KVCache(model.config, keys="exact", values="exact", retain=retain)
        warm(model, part, cache, start)
        rows.append((f"at {start:,}", perplexity(model, part, cache, count_from=300, first_position=start)))
    table("window 256 + 4 sinks, turned, 1536 tokens, counted from 300", rows)


@torch.no_grad()
def warm(model: Any, ids: Tensor, cache: KVCache, length: int) -> None:
    """Fill the cache up to ``length`` tokens by feeding the text over and over."""
    cache.attach(model)
    for start in range(0, length, CHUNK):
        take = [(start + i) % ids.shape[1] for i in range(min(CHUNK, length - start))]
        model(ids[:, take], **{cache_argument(model): cache}, logits_to_keep=1)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--only", choices=("codecs", "retention", "far"))
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = {"WikiText-2": args.text.read_text()[:60_000], "Python reference": technical_text()[:60_000]}
    began = time.perf_counter()
    run(model, {n: torch.tensor([tokenizer.encode(t)]) for n, t in texts.items()}, args.tokens, args.only)
    print(f"\n{time.perf_counter() - began:.0f} s, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
