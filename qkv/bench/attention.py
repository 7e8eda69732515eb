"""One step's attention of one layer over a long context: blocks as they are stored beside dense bf16.

Several queries are a draft being verified: the causal mask among them is left out of the dense arrangements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from qkv.bench.plan import Heads, Plan
from qkv.bench.table import Row, Table, rows_of
from qkv.bench.timing import Entrant, Run, interleave
from qkv.cache.attention import attend
from qkv.cache.codec import Codec
from qkv.cache.layer import CacheLayer
from qkv.cache.settings import LayerSettings
from qkv.cache.storages import peak_nbytes

CODECS: Final = ("int8", "int4", "int2", "nf4", "exact")
UNPACKED_LIMIT: Final = 16_384
"""Unpacking a whole layer a step is shown up to here; beyond, it takes seconds."""


def filled(codec: str, heads: Heads, tokens: int) -> CacheLayer:
    """A layer of ``tokens`` random tokens, all committed."""
    layer = CacheLayer(LayerSettings(keys=Codec.parse(codec, "channel"), values=Codec.parse(codec, "token")))
    generator = torch.Generator().manual_seed(0)
    for start in range(0, tokens, 4096):
        extend(layer, heads, min(4096, tokens - start), generator)
        layer.commit()
    return layer


def extend(layer: CacheLayer, heads: Heads, count: int, generator: torch.Generator | None = None) -> None:
    """Random open tokens."""
    shape = (1, heads.kv, count, heads.dim)
    layer.append(*(torch.randn(shape, generator=generator).bfloat16() for _ in range(2)))


def streamed(layer: CacheLayer, queries: Tensor, with_mass: bool = False) -> Run:
    """One step of attention over the blocks."""
    scale = queries.shape[-1] ** -0.5
    return lambda: attend(queries, layer.attendable()[0], scale=scale, block_size=64, with_mass=with_mass)


def dense(heads: Heads, tokens: int, queries: Tensor) -> list[Entrant]:
    """bf16 attention in three arrangements; the fastest on a CPU, grouped products, first."""
    keys, values = (torch.randn(1, heads.kv, tokens, heads.dim).bfloat16() for _ in range(2))
    rows, scale = queries.view(1, heads.kv, -1, heads.dim), heads.dim**-0.5
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def grouped() -> Tensor:
        scores = torch.matmul(rows * scale, keys.transpose(2, 3))
        return torch.matmul(scores.float().softmax(-1).bfloat16(), values)

    nbytes = keys.nbytes + values.nbytes
    return [
        Entrant("bf16, grouped products", grouped, nbytes),
        Entrant("bf16, sdpa, queries as rows", lambda: sdpa(rows, keys, values), nbytes),
        Entrant("bf16, sdpa, enable_gqa", lambda: sdpa(queries[None], keys, values, enable_gqa=True), nbytes),
    ]


def entrants_of(heads: Heads, tokens: int, count: int, layers: dict[str, CacheLayer], peers: bool) -> list[Entrant]:
    """Everything that is timed for ``count`` queries; the yardstick first."""
    queries = torch.randn(heads.query, count, heads.dim).bfloat16()
    found = dense(heads, tokens, queries)
    found = found if peers else found[:1]
    for codec, layer in layers.items():
        found.append(Entrant(f"{codec} blocks", streamed(layer, queries), layer.nbytes))
        if codec == "int8":
            found.append(Entrant(f"{codec} blocks, with mass", streamed(layer, queries, True), layer.nbytes))
            if peers and count == 1 and tokens <= UNPACKED_LIMIT:
                found.append(Entrant(f"{codec} blocks, unpacked", unpacked(layer, queries), layer.nbytes))
    return found


def at_length(plan: Plan, tokens: int) -> list[Row]:
    """Every number of queries over one context: the open tokens change, the blocks do not."""
    layers = {codec: filled(codec, plan.heads, tokens) for codec in CODECS}
    found: list[Row] = []
    for count in plan.queries:
        for layer in layers.values():
            extend(layer, plan.heads, count)
        entrants = entrants_of(plan.heads, tokens, count, layers, plan.peers)
        measured = interleave(entrants, plan.rounds)
        scratch = [{"scratch MB": peak_nbytes(entrant.run) / 1e6} for entrant in entrants]
        found += rows_of(entrants, measured, {"tokens": tokens, "queries": count}, numbers=scratch)
        for layer in layers.values():
            layer.discard()
    return found


def unpacked(layer: CacheLayer, queries: Tensor) -> Run:
    """One step of dense attention over everything decoded."""

    def run() -> Tensor:
        keys, values = layer.dense()
        rows = queries.view(1, keys.shape[1], -1, queries.shape[-1])
        return torch.nn.functional.scaled_dot_product_attention(rows, keys, values)

    return run


@torch.inference_mode()
def table(plan: Plan, say: Callable[[str], object]) -> Table:
    """Every context, longest last."""
    found: list[Row] = []
    for tokens in sorted(plan.contexts):
        say(f"{tokens:,} tokens")
        found += at_length(plan, tokens)
    heads = plan.heads
    shape = f"{heads.query} heads over {heads.kv} key-value heads, {heads.dim} wide"
    title = f"one step of {shape}, bf16; speed over the first"
    return Table("attention", title, "tokens", found)
