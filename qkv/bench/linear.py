"""Products with quantized weights beside torch's and others', with weights that have left the caches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.bench.plan import Plan
from qkv.bench.table import Row, Table, rows_of
from qkv.bench.timing import Entrant, interleave, rotating
from qkv.integration.decoding import prepare_
from qkv.integration.patch import quantize_
from qkv.quantizers import kernels
from qkv.quantizers.quantize import quantize_tensor

Product = Callable[[Tensor], Tensor]


@dataclass
class Candidate:
    """One way to compute the product: as many copies of it as are needed to stay cold."""

    name: str
    nbytes: int
    product: Callable[..., object]

    def on(self, x: Tensor) -> Entrant:
        """The product with ``x``, to be timed."""
        return Entrant(self.name, lambda: self.product(x), self.nbytes)


def cold(name: str, nbytes: int, make: Callable[[], Product]) -> Candidate:
    """A candidate that makes its copies itself."""
    return Candidate(name, nbytes, rotating(nbytes, make))


def torch_float(weight: Tensor, dtype: torch.dtype) -> Candidate:
    """``F.linear`` in a float dtype."""

    def make() -> Product:
        copy = weight.to(dtype, copy=True)
        return lambda x: torch.nn.functional.linear(x.to(dtype), copy)

    return cold(f"torch {str(dtype).removeprefix('torch.')}", weight.numel() * dtype.itemsize, make)


def ours(weight: Tensor, name: str) -> Candidate:
    """qkv's own product in a format."""
    quantized = quantize_tensor(weight, name)

    def make() -> Product:
        state = {key: tensor.clone() for key, tensor in quantized.state().items()}
        copy = type(quantized).from_state(state, quantized.format, quantized.shape, torch.bfloat16)
        return lambda x: kernels.linear(x, copy)

    return cold(name, quantized.nbytes, make)


def interleaved(weight: Tensor, name: str) -> Candidate | None:
    """The same by a module that :func:`qkv.prepare_` prepared; None where nothing is."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
    layer.weight.data = weight.bfloat16()
    model = torch.nn.Sequential(layer)
    quantize_(model, name)
    prepared = prepare_(model)
    if prepared.left:
        return None
    return cold(f"{name}, interleaved", prepared.nbytes, lambda: copy.deepcopy(model[0]))


def candidates(weight: Tensor, formats: Sequence[str], peers: bool) -> list[Candidate]:
    """The yardstick, torch's bf16 product, first."""
    from qkv.bench.linear_peers import PEERS

    found = [torch_float(weight, torch.bfloat16)]
    if peers:
        found.append(torch_float(weight, torch.float32))
        found += [peer for make in PEERS if (peer := make(weight)) is not None]
    for name in formats:
        found += [ours(weight, name), *(each for each in [interleaved(weight, name)] if each is not None)]
    return found


def measure(shape: tuple[int, int], rows: int, entrants: Sequence[Candidate], rounds: int) -> list[Row]:
    """One shape and number of rows, x in bf16."""
    x = torch.randn(rows, shape[1]).bfloat16()
    timed = [entrant.on(x) for entrant in entrants]
    return rows_of(timed, interleave(timed, rounds), {"out": shape[0], "in": shape[1], "rows": rows})


@torch.inference_mode()
def table(plan: Plan, say: Callable[[str], object]) -> Table:
    """Every shape with every number of rows."""
    found: list[Row] = []
    for shape in plan.shapes:
        entrants = candidates(torch.randn(shape) * 0.05, plan.formats, plan.peers)
        for rows in plan.rows:
            say(f"{shape[0]}x{shape[1]}, {rows} rows")
            found += measure(shape, rows, entrants, plan.rounds)
    return Table("linear", "x in bf16, cold weights, speed over torch's bf16 product", "rows", found)
