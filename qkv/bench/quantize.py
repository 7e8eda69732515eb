"""Quantizing bf16 weights: input bytes a second, beside a plain copy and other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from qkv.bench.linear_peers import installed
from qkv.bench.plan import Plan
from qkv.bench.table import Row, Table, rows_of
from qkv.bench.timing import Entrant, interleave, rotating
from qkv.quantizers.quantize import quantize_tensor

FORMATS: Final = ("int8", "int8:asym", "int4", "nf4", "nf4:double")
SLOW_SECONDS: Final = 0.2


def entrants_of(weight: Tensor, peers: bool) -> list[Entrant]:
    """A copy first, as the yardstick; then ours, and others'."""
    nbytes = weight.nbytes

    def over(run: Callable[[Tensor], object]) -> Callable[[], object]:
        def make() -> Callable[[], object]:
            copy = weight.clone()
            return lambda: run(copy)

        return rotating(nbytes, make)

    found = [Entrant("copy", over(torch.clone), nbytes)]
    found += [Entrant(name, over(_ours(name)), nbytes) for name in FORMATS]
    if peers and installed("bitsandbytes"):
        found.append(Entrant("bitsandbytes nf4", over(_bitsandbytes), nbytes))
    if peers and installed("optimum.quanto"):
        found.append(Entrant("quanto int8", over(_quanto), nbytes))
    return found


@torch.inference_mode()
def table(plan: Plan, say: Callable[[str], object]) -> Table:
    """Every tensor in bf16."""
    found: list[Row] = []
    for shape in plan.quantize:
        say(f"{shape[0]}x{shape[1]}")
        weight = (torch.randn(shape) * 0.05).bfloat16()
        entrants = entrants_of(weight, plan.peers)
        measured = interleave(entrants, plan.rounds)
        speeds = [{"GB/s": weight.nbytes / min(turn.fastest for turn in turns) / 1e9} for turns in measured.turns]
        medians = rows_of(entrants, measured, {"elements": weight.numel()}, numbers=speeds)
        found += medians
    return Table("quantize", "bf16 in, GB/s of input in the fastest call, speed over a copy", "elements", found)


def _ours(name: str) -> Callable[[Tensor], object]:
    return lambda weight: quantize_tensor(weight, name)


def _bitsandbytes(weight: Tensor) -> object:
    from bitsandbytes.functional import quantize_4bit

    return quantize_4bit(weight, blocksize=64, quant_type="nf4")


def _quanto(weight: Tensor) -> object:
    from optimum.quanto import AbsmaxOptimizer, qint8, quantize_weight

    scale = AbsmaxOptimizer()(weight, qtype=qint8, axis=0)
    return quantize_weight(weight, qtype=qint8, axis=0, scale=scale, activation_qtype=None)
