"""Products with quantized weights beside torch's and bitsandbytes', with cold weights.

    python -m benchmarks.linear [--shapes 4096x4096,576x576] [--rows 1,4,8,64] [--rounds 15] [--json FILE]

All candidates take turns in every round, and each call reads a copy of its weight that has left the caches.
Speed-ups over torch's bf16 product are medians of the rounds' ratios, and ratios of the fastest calls: on a
machine that others use too, the second is the sounder. ``share`` is the weight's bytes a second over those that
four distant streams a thread read, nothing being computed (fastest of both). An ideal bf16 product would
be as fast as its own bytes allow: nf4 could gain 3.55 over it and int8 1.88.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from qkv.quantizers import kernels
from qkv.quantizers.kernels import native
from qkv.quantizers.quantize import quantize_tensor

SHAPES = ("576x576", "1536x576", "4096x4096", "11008x4096")
FORMATS = ("nf4", "int4", "int8", "int8:asym")
COLD_NBYTES, MAX_COPIES = 160 * 2**20, 400
ROUND_SECONDS = 0.02
"""Each candidate's turn in a round lasts about so long."""

Product = Callable[[Tensor], Tensor]


@dataclass
class Candidate:
    """One way to compute the product: as many copies of it as are needed to stay cold."""

    name: str
    nbytes: int
    products: list[Product]
    calls: int = 1
    turn: int = 0

    def round(self, x: Tensor) -> tuple[float, float]:
        """Median and least of the seconds its calls take."""
        seconds = []
        for _ in range(self.calls):
            start = time.perf_counter()
            self.products[self.turn % len(self.products)](x)
            seconds.append(time.perf_counter() - start)
            self.turn += 1
        return statistics.median(seconds), min(seconds)


@dataclass
class Row:
    """A line of the table."""

    shape: str
    rows: int
    name: str
    median_us: float
    fastest_us: float
    median_speedup: float
    fastest_speedup: float
    share: float


def cold(name: str, nbytes: int, make: Callable[[], Product]) -> Candidate:
    copies = max(2, min(MAX_COPIES, -(-COLD_NBYTES // nbytes)))
    return Candidate(name, nbytes, [make() for _ in range(copies)])


def torch_float(weight: Tensor, dtype: torch.dtype) -> Candidate:
    def make() -> Product:
        copy = weight.to(dtype, copy=True)
        return lambda x: torch.nn.functional.linear(x.to(dtype), copy)

    return cold(f"torch {str(dtype).removeprefix('torch.')}", weight.numel() * dtype.itemsize, make)


def torch_int8(weight: Tensor) -> Candidate:
    """torch's packed int8: one scale a row."""
    scale = weight.abs().amax(1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)

    def make() -> Product:
        copy, scales = codes.clone(), scale.bfloat16()
        return lambda x: torch.ops.aten._weight_int8pack_mm(x, copy, scales)

    return cold("torch int8 a row", codes.numel(), make)


def bitsandbytes_nf4(weight: Tensor) -> Candidate:
    import bitsandbytes

    def make() -> Product:
        layer = bitsandbytes.nn.Linear4bit(
            weight.shape[1], weight.shape[0], bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        layer.weight = bitsandbytes.nn.Params4bit(weight.bfloat16(), requires_grad=False, quant_type="nf4").to("cpu")
        product: Product = layer.eval().requires_grad_(False)
        return product

    return cold("bitsandbytes nf4", weight.numel() * 9 // 16, make)


def ours(weight: Tensor, name: str) -> Candidate:
    quantized = quantize_tensor(weight, name)

    def make() -> Product:
        state = {key: tensor.clone() for key, tensor in quantized.state().items()}
        copy = type(quantized).from_state(state, quantized.format, quantized.shape, torch.bfloat16)
        return lambda x: kernels.linear(x, copy)

    return cold(name, quantized.nbytes, make)


def candidates(weight: Tensor, formats: Sequence[str], peers: bool) -> list[Candidate]:
    """The yardstick first."""
    found = [torch_float(weight, torch.bfloat16)]
    if peers:
        found += [torch_float(weight, torch.float32), torch_int8(weight), bitsandbytes_nf4(weight)]
    return found + [ours(weight, name) for name in formats]


def measure(shape: str, rows: int, entrants: list[Candidate], rounds: int) -> list[Row]:
    """All candidates in turn, ``rounds`` times; and the memory's speed in between."""
    x = torch.randn(rows, int(shape.split("x")[1])).bfloat16()
    memory = torch.ones(64 * 2**20, dtype=torch.uint8)
    for entrant in entrants:
        entrant.calls = 2
        entrant.round(x)
        entrant.calls = max(1, min(200, int(ROUND_SECONDS / entrant.round(x)[1])))
    rounds_of: list[list[tuple[float, float]]] = [[] for _ in entrants]
    reading = []
    for _ in range(rounds):
        for entrant, found in zip(entrants, rounds_of, strict=True):
            found.append(entrant.round(x))
        start = time.perf_counter()
        native.read(memory)
        reading.append(time.perf_counter() - start)
    bandwidth = memory.numel() / min(reading)
    yardstick = rounds_of[0]
    return [
        _row(shape, rows, entrant, found, yardstick, bandwidth)
        for entrant, found in zip(entrants, rounds_of, strict=True)
    ]


def _row(
    shape: str,
    rows: int,
    entrant: Candidate,
    found: list[tuple[float, float]],
    yardstick: list[tuple[float, float]],
    bandwidth: float,
) -> Row:
    medians, fastest = [round[0] for round in found], min(round[1] for round in found)
    ratios = [slow[0] / fast for slow, fast in zip(yardstick, medians, strict=True)]
    return Row(
        shape,
        rows,
        entrant.name,
        statistics.median(medians) * 1e6,
        fastest * 1e6,
        statistics.median(ratios),
        min(round[1] for round in yardstick) / fastest,
        entrant.nbytes / fastest / bandwidth,
    )


def _line(row: Row) -> str:
    median = f"{row.median_us:9.0f} us x{row.median_speedup:5.2f}"
    fastest = f"fastest {row.fastest_us:9.0f} us x{row.fastest_speedup:5.2f}"
    return f"{row.shape:>12} {row.rows:4d} rows  {row.name:18} {median}   {fastest}   share {row.share:4.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="out x in, for example 4096x4096")
    parser.add_argument("--rows", default="1,4,8,64", help="rows of x")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-peers", action="store_true", help="torch's bf16 product and ours alone")
    parser.add_argument("--json", type=Path, help="keep the table in a file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{torch.get_num_threads()} threads, native kernels: {native.unavailable() or native.level()}")
    table: list[Row] = []
    for shape in options.shapes.split(","):
        out_features, in_features = (int(size) for size in shape.split("x"))
        entrants = candidates(
            torch.randn(out_features, in_features) * 0.05, options.formats.split(","), not options.no_peers
        )
        for rows in (int(count) for count in options.rows.split(",")):
            for row in measure(shape, rows, entrants, options.rounds):
                table.append(row)
                print(_line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in table], indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
