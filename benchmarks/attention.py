"""Attention over blocks against dense attention: time ratios and transients, one step of one layer.

    python benchmarks/attention.py [--tokens 32768] [--rounds 7]

The layer is Llama-3-8B's (32 query heads, 8 key/value heads, 128 wide). The yardstick is bf16
scaled-dot-product attention in its fastest arrangement on a CPU: the queries of a group as rows. All variants
take turns in every round; ratios are medians of the rounds' ratios. Transients come from tracked storages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from qkv.cache.attention import attend
from qkv.cache.codec import Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.settings import LayerSettings
from qkv.cache.storages import peak_nbytes

HEADS, GROUP, DIM = 8, 4, 128
CODECS = {
    "int8 / int8": ("int8", "int8"),
    "int4 / int4": ("int4", "int4"),
    "int2 / int2": ("int2", "int2"),
    "nf4 / nf4": ("nf4", "nf4"),
    "exact bf16": ("exact", "exact"),
}


def filled(keys: str, values: str, tokens: int) -> CacheLayer:
    """A layer of ``tokens`` random tokens, one of them open."""
    layer = CacheLayer(LayerSettings(keys=Codec.parse(keys, "channel"), values=Codec.parse(values, "token")))
    generator = torch.Generator().manual_seed(0)
    for start in range(0, tokens, 4096):
        shape = (1, HEADS, min(4096, tokens - start), DIM)
        layer.append(*(torch.randn(shape, generator=generator).bfloat16() for _ in range(2)))
        layer.commit()
    layer.append(*(torch.randn(1, HEADS, 1, DIM, generator=generator).bfloat16() for _ in range(2)))
    return layer


def streamed(layer: CacheLayer, queries: Tensor, with_mass: bool = False) -> Callable[[], object]:
    """One step of attention over the blocks."""
    return lambda: attend(queries, layer.attendable()[0], scale=DIM**-0.5, block_size=64, with_mass=with_mass)


def unpacked(layer: CacheLayer, queries: Tensor) -> Callable[[], object]:
    """One step of dense attention over everything decoded."""
    rows = queries.view(1, HEADS, GROUP, DIM)
    return lambda: torch.nn.functional.scaled_dot_product_attention(rows, *layer.dense())


def variants(tokens: int, queries: Tensor) -> dict[str, Callable[[], object]]:
    """Everything that is timed, by name; the yardstick first."""
    shape = (1, HEADS, tokens, DIM)
    keys, values = (torch.randn(shape).bfloat16() for _ in range(2))
    rows = queries.view(1, HEADS, GROUP, DIM)
    found: dict[str, Callable[[], object]] = {
        "bf16 dense (yardstick)": lambda: torch.nn.functional.scaled_dot_product_attention(rows, keys, values),
    }
    for name, (key_codec, value_codec) in CODECS.items():
        layer = filled(key_codec, value_codec, tokens - 1)
        found[f"{name}, blocks"] = streamed(layer, queries)
        if name == "int8 / int8":
            found[f"{name}, blocks with mass"] = streamed(layer, queries, with_mass=True)
            found[f"{name}, unpacked"] = unpacked(layer, queries)
    return found


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    queries = torch.randn(HEADS * GROUP, 1, DIM).bfloat16()
    runs = variants(args.tokens, queries)
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(timed(run))
    base = times["bf16 dense (yardstick)"]
    print(f"{args.tokens} tokens, {args.rounds} rounds, 1 thread, torch {torch.__version__}")
    print(f"{'':30} {'ms':>8} {'ratio':>7} {'transient MB':>13}")
    for name, found in times.items():
        ratio = statistics.median(t / b for t, b in zip(found, base, strict=True))
        transient = peak_nbytes(runs[name]) / 1e6
        print(f"{name:30} {statistics.median(found) * 1e3:8.2f} {ratio:7.2f} {transient:13.2f}")


if __name__ == "__main__":
    main()
