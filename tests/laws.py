"""The central laws as functions: each returns None or fails an assertion. ``test_mutants`` shows that each can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

import qkv.memory.footprint
import qkv.quantizers.kernels
from qkv.checkpoint.layouts import LAYOUTS
from qkv.checkpoint.layouts.base import Weight
from qkv.errors import QkvError
from qkv.integration.patch import quantize_
from qkv.quantizers.budget import Ladder, Unit
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import reference
from qkv.quantizers.nf4 import LEVELS
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import TOLERANCES, each_scale, group_max, live_nbytes, tiny

EPS = torch.finfo(torch.float32).eps * TOLERANCES["ulps"]
SMALLEST = 2.0**-149  # of float32: what a denormal product may be rounded by
KINDS = ("normal", "one sign", "constant", "some zero groups", "denormal", "huge", "magnitudes", "small grid", "spike")


def sample(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """``float32`` values of a kind that quantizers get wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "one sign":
        x = x.abs() + 5
        return -x if seed % 2 else x
    if kind == "constant":
        return torch.full(shape, float(torch.randn((), generator=generator)))
    if kind == "some zero groups":
        return x * (torch.arange(shape[-1]) // 16 % 2)
    if kind == "denormal":
        return x * 1e-42
    if kind == "huge":
        return (x / 5).clamp(-1, 1) * torch.finfo(torch.float32).max
    if kind == "magnitudes":
        return x * 10.0 ** torch.randint(-37, 38, shape, generator=generator)
    if kind == "small grid":
        return torch.randint(-3, 4, shape, generator=generator) / 8
    if kind == "spike" and x.numel():
        x.reshape(-1)[seed % x.numel()] = 1e4
    return x


def check_error_bound(x: Tensor, format: Format) -> None:
    """``|x - x̂| <= scale / 2`` (int), nearest level (nf4); double quantization adds what it changes a scale by."""
    weight = quantize_tensor(x, format)
    exact, got = x.double(), weight.dequantize(torch.float32).double()
    assert torch.isfinite(got).all()
    scale = each_scale(weight.float_scale(), tuple(x.shape), format)
    plain = quantize_tensor(x, replace(format, double_quant=False)).float_scale()
    unrounded = each_scale(plain, tuple(x.shape), format)
    error = (exact - got).abs()
    if format.name == "nf4":
        absmax = group_max(x.abs(), format)
        levels = torch.tensor(LEVELS, dtype=torch.float64)
        nearest = (exact[..., None] - levels * absmax[..., None]).abs().amin(-1)
        allowed = nearest + EPS * absmax + (scale - unrounded).abs() * (1 + EPS)
        widest = float((levels[1:] - levels[:-1]).max()) / 2
        assert bool((nearest <= absmax * widest * (1 + EPS) + SMALLEST).all())
    else:
        qmax = 2**format.bits - 1 if not format.symmetric else 2 ** (format.bits - 1) - 1
        steps = 0.5 if format.symmetric else 0.5 + TOLERANCES["step"]
        below = (unrounded - scale).clamp(min=0)  # rounding of the scale's offset, and no more
        assert not x.numel() or float(below.max()) <= EPS * float(unrounded.max())
        allowed = scale * steps + EPS * exact.abs() + below * qmax
    worst = (error - allowed).max() if x.numel() else torch.zeros(())
    assert bool((error <= allowed + SMALLEST).all()), f"{format}: {float(worst):g} beyond the bound"


def check_fixed_point(x: Tensor, format: Format) -> None:
    """Quantizing a dequantized tensor again gives the same codes, and the same zero points."""
    first = quantize_tensor(x, format)
    again = quantize_tensor(first.dequantize(torch.float32), format)
    assert torch.equal(first.codes, again.codes)
    assert first.zero is None or torch.equal(first.zero, again.zero)  # type: ignore[arg-type]


def check_stored_as_said(x: Tensor, format: Format) -> None:
    """Shapes, dtypes and bytes are those of ``Format.layout``, each storage is its tensor's alone."""
    weight = quantize_tensor(x, format)
    state = weight.state("w")
    layout = format.layout(tuple(x.shape))
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "w" + suffix: entry for suffix, entry in layout.items()
    }
    assert all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in state.values())
    assert weight.nbytes == sum(t.untyped_storage().nbytes() for t in state.values())
    assert weight.nbytes == format.stored_nbytes(tuple(x.shape))
    back = weight.dequantize()
    assert back.shape == x.shape and back.dtype == x.dtype


def check_groups_apart(x: Tensor, format: Format, row: int, column: int) -> None:
    """One outlier changes its own group and nothing else."""
    size = x.shape[-1] if format.group_size == "row" else int(format.group_size)
    other = x.clone()
    other[row, column] = 1e4
    apart = torch.ones_like(x, dtype=torch.bool)
    start = column // size * size
    apart[row, start : start + size] = False
    before, after = (quantize_tensor(t, format).dequantize() for t in (x, other))
    assert torch.equal(before[apart], after[apart])
    assert abs(float(after[row, column]) - 1e4) < 50


def check_like_bitsandbytes(x: Tensor, block: int) -> None:
    """NF4 codes, absmax and values are bit for bit those of bitsandbytes (rows being multiples of the block)."""
    import bitsandbytes.functional as bnb

    assert x.shape[-1] % block == 0
    packed, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4", compress_statistics=False)
    weight = quantize_tensor(x, Format("nf4", block))
    assert torch.equal(weight.codes.reshape(-1), packed.reshape(-1))
    assert torch.equal(weight.scale.reshape(-1), state.absmax)
    assert torch.equal(weight.dequantize(), bnb.dequantize_4bit(packed, state))


def check_product(x: Tensor, weight: Tensor, bias: Tensor | None, format: Format) -> None:
    """``kernels.linear`` equals the reference for this case."""
    quantized = quantize_tensor(weight, format)
    want = reference.linear(x.double(), quantized, None if bias is None else bias.double())
    got = qkv.quantizers.kernels.linear(x, quantized, bias)
    scale = x.double().abs() @ reference.dequantize(quantized, torch.float64).abs().T + 1e-30
    assert got.dtype == x.dtype and got.shape == want.shape
    assert bool(((got.double() - want).abs() <= TOLERANCES["product"][x.dtype] * scale).all())


def check_forward_is_pure(model: Any, ids: Tensor) -> None:
    """A forward, and a backward, leave every stored byte and every name as they were."""
    before = {name: (t.data_ptr(), t.dtype, t.clone()) for name, t in model.state_dict().items()}
    model(ids, labels=ids).loss.backward()
    model.zero_grad()
    after = model.state_dict()
    assert list(before) == list(after)
    for name, (pointer, dtype, value) in before.items():
        assert after[name].data_ptr() == pointer and after[name].dtype == dtype, name
        assert torch.equal(after[name], value), name


def check_counted_once() -> None:
    """A live footprint is the sum of the storages: tied weights once, codes and scales both."""
    model = tiny("llama_tied")
    unique = sum(parameter.numel() for parameter in model.parameters())
    for format in (None, "int8", "nf4:double"):
        if format:
            quantize_(model, format, embeddings="int8") if format == "int8" else None
        report = qkv.memory.footprint.footprint(model)
        assert report.weight_nbytes == live_nbytes(model)
        assert report.num_parameters == unique


def check_gradient(layer: nn.Linear, dtype: torch.dtype) -> None:
    """The gradient of the input is that of a float layer with the dequantized weight."""
    x = torch.randn(3, layer.in_features, dtype=dtype, requires_grad=True)
    grad = torch.randn(3, layer.out_features, dtype=dtype)
    layer(x).backward(grad)
    weight = layer.quantized().dequantize(torch.float64)  # type: ignore[operator]
    want = grad.double() @ weight
    scale = grad.double().abs() @ weight.abs() + 1e-30
    assert x.grad is not None and x.grad.dtype == dtype
    assert bool(((x.grad.double() - want).abs() <= TOLERANCES["product"][dtype] * scale).all())


def num_groups(columns: int, format: Format) -> int:
    """Groups of a row, by the definition."""
    return ceil(columns / format.group_length(columns))


def check_searched_scales(x: Tensor, format: Format, importance: Tensor) -> None:
    """Searched scales never weigh more than those that span: a group each, or under nesting, as a whole."""
    plain, searched = quantize_tensor(x, format), quantize_tensor(x, format, importance=importance)
    assert plain.format == searched.format and plain.state().keys() == searched.state().keys()
    before, after = (weighted_errors(x, weight, importance) for weight in (plain, searched))
    allowed = before * (1 + SEARCH_SLACK) + SMALLEST * 2**100
    assert bool((after <= allowed).all()), f"{format}: {float((after - before).max())} more"


def check_nearest_codes(x: Tensor, format: Format, importance: Tensor) -> None:
    """Under searched scales each element has the nearest value that its group can stand for."""
    weight = quantize_tensor(x, format, importance=importance)
    scale = each_scale(weight.float_scale(), tuple(x.shape), format)[..., None]
    if format.name == "nf4":
        values = torch.tensor(LEVELS, dtype=torch.float64) * scale
    else:
        top = 2**format.bits - 1
        codes = torch.arange(top + 1, dtype=torch.float64) - (2 ** (format.bits - 1) if format.symmetric else 0)
        codes = codes[codes > -(2 ** (format.bits - 1))] if format.symmetric else codes
        zero = 0.0 if weight.zero is None else each_scale(weight.zero.float(), tuple(x.shape), format)[..., None]
        values = (codes - zero) * scale
    nearest = (x.double()[..., None] - values).abs().amin(-1)
    error = (x.double() - weight.dequantize(torch.float32).double()).abs()
    assert bool((error <= nearest + EPS * x.double().abs() + EPS * scale[..., 0]).all())


SEARCH_SLACK = 1e-5
"""Of a weighted error: it is summed in float32 while scales are searched."""


def weighted_errors(x: Tensor, weight: Any, importance: Tensor) -> Tensor:
    """Squared error times importance of each group, float64; written out naively. One sum under nested scales."""
    format, columns = weight.format, x.shape[-1]
    error: Tensor = (x.double() - weight.dequantize(torch.float32).double()).square()
    spread = importance.double() if importance.dim() == 1 else importance.double()[:, None]
    error = (error * spread).reshape(-1, columns)
    if format.double_quant or format.group_size == "tensor":
        return error.sum()[None]
    length = format.group_length(columns)
    return torch.stack([error[:, i : i + length].sum(-1) for i in range(0, columns, length)], -1)


def check_hull(units: Sequence[Unit]) -> None:
    """Along a hull sizes grow, losses shrink, and no option lies below the line between two neighbours."""
    for unit in units:
        hull = unit.hull()
        assert hull[0].nbytes == min(option.nbytes for option in unit.options)
        for first, second in pairwise(hull):
            assert first.nbytes < second.nbytes and first.loss > second.loss
            for other in unit.options:
                if first.nbytes < other.nbytes < second.nbytes:
                    share = (other.nbytes - first.nbytes) / (second.nbytes - first.nbytes)
                    assert other.loss >= first.loss + share * (second.loss - first.loss) - 1e-9
        gains = [(a.loss - b.loss) / (b.nbytes - a.nbytes) for a, b in pairwise(hull)]
        assert all(first > second for first, second in pairwise(gains))


def check_ladder(units: Sequence[Unit]) -> None:
    """Every plan of the ladder is the best of all of its size or less."""
    choices = list(product(*(unit.options for unit in units)))
    ladder = Ladder(units, 0, 8)
    for index in range(len(ladder)):
        plan = ladder[index]
        best = min(sum(o.loss for o in each) for each in choices if sum(o.nbytes for o in each) <= plan.nbytes)
        assert plan.loss is not None and plan.loss <= best + 1e-9


def check_within(units: Sequence[Unit], budget: int) -> None:
    """A plan fits, is refused only where nothing fits, and loses at most one step's worth against the best of all."""
    choices = list(product(*(unit.options for unit in units)))
    fitting = [sum(o.loss for o in each) for each in choices if sum(o.nbytes for o in each) <= budget]
    if not fitting:
        try:
            Ladder(units, 0, 8).within(budget)
        except QkvError:
            return
        raise AssertionError("a plan that cannot fit")
    plan = Ladder(units, 0, 8).within(budget)
    chosen = {name: format for formats in (plan.layers, plan.tables) for name, format in formats.items()}
    taken = [next(o for o in unit.options if o.format == chosen[unit.modules[0]]) for unit in units]
    assert plan.nbytes == sum(option.nbytes for option in taken) <= budget
    assert plan.loss is not None and abs(plan.loss - sum(option.loss for option in taken)) < 1e-9
    largest = max((a.loss - b.loss for unit in units for a, b in pairwise(unit.hull())), default=0.0)
    assert plan.loss <= min(fitting) + largest + 1e-9


def check_packed() -> None:
    """compressed-tensors' int32, taken apart bit by bit: each element within half a step of its stored scale."""
    x = sample("normal", (4, 128), 5).bfloat16()
    for text in ("int4:g32", "int8:g64", "int8:row"):
        format = Format.parse(text)
        weight = Weight("w", "m", format, (4, 128), torch.bfloat16)
        state = LAYOUTS["compressed-tensors"].encode(weight, x, None)
        bits, scale = format.bits, state["w_scale"].double()
        words = state["w_packed"].long()
        codes = torch.stack([(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)], -1).flatten(1)
        values = (codes - 2 ** (bits - 1)) * scale.repeat_interleave(128 // scale.shape[1], 1)
        half = scale.repeat_interleave(128 // scale.shape[1], 1) / 2
        assert state["w_scale"].dtype == torch.bfloat16
        assert bool(((x.double() - values).abs() <= half * (1 + EPS)).all())


def check_blocks() -> None:
    """bitsandbytes' blocks run over the flattened weight, whatever its rows, and hold its own largest magnitudes."""
    x = sample("normal", (4, 96), 6)
    weight = Weight("w", "m", Format.parse("nf4"), (4, 96), torch.float32)
    state = LAYOUTS["bnb"].encode(weight, x, None)
    assert torch.equal(state["w.absmax"], x.reshape(6, 64).abs().amax(1))
    assert state["w"].shape == (192, 1)
