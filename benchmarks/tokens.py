"""Tokens a second by format against the same model in bfloat16, every format in turn in every round.

python -m benchmarks.tokens MODEL_DIR [--rounds 5] [--new-tokens 64] [--prefill 256] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import qkv

FORMATS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("int8", "int8", {}),
    ("int8:row", "int8:row", {}),
    ("int8, head int8", "int8", {"embeddings": "int8"}),
    ("nf4", "nf4", {}),
    ("nf4:double", "nf4:double", {}),
    ("nf4, head int8", "nf4", {"embeddings": "int8"}),
    ("int4", "int4", {}),
)


@torch.inference_mode()
def measure(model: Any, prompt: torch.Tensor, long_prompt: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds of a greedy generation, and of reading a long prompt."""
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    middle = time.perf_counter()
    model(long_prompt)
    return middle - start, time.perf_counter() - middle


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--json")
    options = parser.parse_args()
    models = {"bfloat16": qkv.load(options.model, dtype="bfloat16")}
    for name, format, settings in FORMATS:
        models[name] = copy.deepcopy(models["bfloat16"])
        qkv.quantize_(models[name], format, **settings)
    vocabulary = models["bfloat16"].config.vocab_size
    torch.manual_seed(0)
    prompt, long_prompt = (torch.randint(3, vocabulary, (1, n)) for n in (8, options.prefill))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(options.rounds + 1):
        for name, model in models.items():
            taken = measure(model, prompt, long_prompt, options.new_tokens)
            if turn:  # the first round warms up
                seconds[name].append(taken)
    rows = []
    for name, taken in seconds.items():
        decode, prefill = (statistics.median(t[i] for t in taken) for i in (0, 1))
        ratios = [[b[i] / t[i] for b, t in zip(seconds["bfloat16"], taken, strict=True)] for i in (0, 1)]
        row = {
            "weights": name,
            "weight_mb": qkv.footprint(models[name]).weight_nbytes / 1e6,
            "tokens_per_second": options.new_tokens / decode,
            "decode_speed": statistics.median(ratios[0]),
            "prefill_tokens_per_second": options.prefill / prefill,
            "prefill_speed": statistics.median(ratios[1]),
        }
        rows.append(row)
        print(
            f"{name:18} {row['weight_mb']:8.1f} MB   {row['tokens_per_second']:6.1f} tokens/s"
            f" {row['decode_speed']:5.2f} x"
            f"   prefill {row['prefill_tokens_per_second']:7.0f} tokens/s {row['prefill_speed']:5.2f} x"
        )
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, medians of {options.rounds} rounds in turn")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
