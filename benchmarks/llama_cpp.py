"""Decoding and reading against llama.cpp's own benchmark, in turn in every round, with as many threads.

    python -m benchmarks.llama_cpp MODEL_DIR --bench llama-bench --gguf Q4_0.gguf Q8_0.gguf [--rounds 5] [--json FILE]

MODEL_DIR and the GGUF files hold models of one shape (values do not change the time). llama-bench generates from an
empty context, here after 8 tokens; both read 256 tokens. Its time is its own account, that of a model it has loaded.
``python -m benchmarks.llama_cpp --make DIR`` writes a random model of 1.06 billion parameters as safetensors and
``f16.gguf``, for llama-quantize to make Q4_0 and Q8_0 of.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import qkv
from qkv.bench.decode import generating, reading
from qkv.bench.models import random_llama

PREFILL = 256
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8, head int8": {"format": "int8", "embeddings": "int8"},
    "nf4": {"format": "nf4"},
    "nf4, head int8": {"format": "nf4", "embeddings": "int8"},
}
Rates = Callable[[], tuple[float, float]]
"""Tokens a second: generated, and read."""


def ours(directory: Path, tokens: int, settings: dict[str, Any]) -> Rates:
    """A format of ours, prepared."""
    model = qkv.load(directory, dtype="bfloat16")
    if settings:
        qkv.quantize_(model, **settings)
        qkv.prepare_(model)
    write, read = generating(model, tokens), reading(model, PREFILL)

    @torch.inference_mode()
    def rates() -> tuple[float, float]:
        return tokens / seconds(write), PREFILL / seconds(read)

    rates()
    return rates


def theirs(bench: str, gguf: Path, tokens: int) -> Rates:
    """A file of llama.cpp's."""
    threads = str(torch.get_num_threads())
    command = [bench, "-m", str(gguf), "-t", threads, "-n", str(tokens), "-p", str(PREFILL), "-r", "1", "-o", "json"]

    def rates() -> tuple[float, float]:
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        by_kind = {bool(row["n_gen"]): float(row["avg_ts"]) for row in found}
        return by_kind[True], by_kind[False]

    return rates


def seconds(run: Callable[[], Any]) -> float:
    """Wall time."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def make(directory: Path) -> None:
    """The random model both ways."""
    import gguf
    from transformers import AutoConfig

    random_llama(directory, 2048)
    config = AutoConfig.from_pretrained(directory)
    writer = gguf.GGUFWriter(directory / "f16.gguf", "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in qkv.load(directory).state_dict().items():
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is not None and name != "lm_head.weight":
            writer.add_tensor(found, tensor.to(torch.float32 if tensor.ndim == 1 else torch.float16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--make", type=Path)
    parser.add_argument("--bench", default="llama-bench")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.make:
        return make(options.make)
    if options.model is None:
        parser.error("give a model directory, or --make DIR")
    entrants = {f"llama.cpp {path.stem}": theirs(options.bench, path, options.tokens) for path in options.gguf}
    for name, settings in {"bfloat16, transformers": {}, **FORMATS}.items():
        entrants[name] = ours(options.model, options.tokens, settings)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in entrants}
    for turn in range(options.rounds):
        for name, rates in list(entrants.items())[:: -1 if turn % 2 else 1]:
            found[name].append(rates())
    rows = []
    for name, pairs in found.items():
        wrote, read = (statistics.median(side) for side in zip(*pairs, strict=True))
        rows.append({"name": name, "tokens/s": wrote, "read/s": read})
        print(f"{name:28} {wrote:7.1f} tokens/s   reads {read:7.1f} tokens/s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
