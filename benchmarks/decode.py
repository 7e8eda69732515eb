"""The speculative decoder against transformers' own greedy decoding and its prompt lookup: CPU-time ratios.

    python benchmarks/decode.py MODEL [--dtype bfloat16] [--tokens 160] [--rounds 1] [--prompts copy story]
                                [--variants none lookup] [--json FILE]

All variants take turns in every round, on one thread; the ratio is CPU time of transformers' greedy over that
of the variant, median of the rounds. Each run starts from a new decoder that has learnt nothing. Outputs are
compared with greedy; in bfloat16 they may part at near ties, because a block of tokens rounds otherwise than one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from qkv.integration.decoder import SpeculativeDecoder

ARTICLE = (
    "The lighthouse at Saltmarsh Point was built in 1874 by the engineer Walter Harrow, who had spent nine years "
    "drawing plans for it. It stands forty-one metres above the sea and its lamp can be seen for thirty "
    "kilometres on a clear night. During the great storm of 1911 the keeper, Ada Linden, kept the light burning "
    "for six days without sleep, and eleven ships found their way into the harbour. The lamp was changed to "
    "electricity in 1936, and the last keeper left in 1988. Today the tower is a museum that is open from April "
    "to October, and volunteers repaint it every third year. In the cellar hangs a map on which Harrow marked every "
    "wreck that he knew of, and beside it the bell of the schooner Good Intent, which a fisherman found in his nets."
)
CODE = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def variance(values):
    average = mean(values)
    total = 0
    for value in values:
        total = total + (value - average) ** 2
    return total / len(values)
"""
PROMPTS = {
    "copy": f"Repeat the following text word for word, and nothing else.\n\n{ARTICLE}",
    "summarise": f"Summarise the following text in three sentences, using its own words.\n\n{ARTICLE}",
    "edit": f"Rename the variable `total` to `result` in this code and print all of the code.\n\n```python\n{CODE}```",
    "story": "Tell me a story about a fox who wants to learn to sail.",
}
Run = Callable[[], tuple[Tensor, str]]


def variants(model: Any, ids: Tensor, tokens: int, chosen: list[str]) -> dict[str, Run]:
    """Everything that is timed, by name; the yardstick first."""
    common: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(ids)

    def stock(**options: Any) -> Run:
        return lambda: (model.generate(ids, attention_mask=mask, **common, **options), "")

    def ours(source: str) -> Run:
        def run() -> tuple[Tensor, str]:
            decoder = SpeculativeDecoder(model, source=source)
            return decoder.generate(ids, **common), str(decoder.stats)

        return run

    found = {
        "greedy": stock(),
        "stock lookup": stock(prompt_lookup_num_tokens=10),
        "none": ours("none"),
        "lookup": ours("lookup"),
        "ngram": ours("ngram"),
    }
    return {name: run for name, run in found.items() if name in ("greedy", *chosen)}


def measure(model: Any, ids: Tensor, tokens: int, rounds: int, chosen: list[str]) -> list[dict[str, Any]]:
    """A row for each variant."""
    runs = variants(model, ids, tokens, chosen)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    outputs: dict[str, Tensor] = {}
    notes: dict[str, str] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            outputs[name], notes[name] = run()
            seconds[name].append(time.process_time() - start)
    base = seconds["greedy"]
    return [
        {
            "variant": name,
            "cpu_seconds": statistics.median(found),
            "ratio": statistics.median(b / s for b, s in zip(base, found, strict=True)),
            "equal": same_until(outputs["greedy"], outputs[name]) - ids.shape[1],
            "tokens": outputs[name].shape[1] - ids.shape[1],
            "note": notes[name],
        }
        for name, found in seconds.items()
    ]


def same_until(first: Tensor, second: Tensor) -> int:
    """Number of tokens that agree."""
    width = min(first.shape[1], second.shape[1])
    differs = (first[0, :width] != second[0, :width]).nonzero()
    return int(differs[0]) if len(differs) else width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=list(PROMPTS))
    parser.add_argument("--variants", nargs="+", default=["stock lookup", "none", "lookup"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    rows = []
    for name in args.prompts:
        message = [{"role": "user", "content": PROMPTS[name]}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt").input_ids
        for row in measure(model, ids, args.tokens, args.rounds, args.variants):
            rows.append({"prompt": name, "dtype": args.dtype, **row})
            print(
                f"{name:10} {row['variant']:13} {row['cpu_seconds']:7.2f} s {row['ratio']:6.2f}x  "
                f"equal {row['equal']}/{row['tokens']}  {row['note']}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
