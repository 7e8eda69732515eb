"""Scales searched for the inputs that a layer really gets: what is kept close is its output, not its weight.

An error ``e[i, j]`` of a weight adds ``E[x[j]²] e[i, j]²`` to the mean squared error of output ``i``, the inputs
taken as uncorrelated (as llama.cpp's importance matrices do). So the mean squares of the inputs, the importance
of the columns, weigh the error by which a group's scale is chosen: of a row of ratios to the scale that spans
the group, the best, and of that the least-squares fit to its own codes. Without such weights, as an error of
the weight alone, the same search makes models worse, because it clips the large weights; it is not offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Final

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.quantizers import nf4
from qkv.quantizers.format import Format
from qkv.quantizers.grouping import row_chunks, to_groups
from qkv.quantizers.scales import Range, Scales, decode, encode, scales_of, spanning_scales
from qkv.quantizers.tensor import QuantizedTensor

RATIOS: Final = tuple(step / 32 for step in range(18, 37))
"""Scales tried, as parts of the one that spans the group."""
NUM_FITS: Final = 2
"""Least-squares fits of a scale to its codes, each followed by choosing the codes again."""
CHUNK_ELEMENTS: Final = 2**18
"""Worked on at once: small enough that the arrays of a chunk stay in a processor's cache."""
TABLE_STEPS: Final = 2**11
"""Steps a unit of the table that rounds to NF4 levels while ratios are compared."""
_TINY = torch.finfo(torch.float32).tiny


def check_importance(importance: Tensor, shape: tuple[int, ...], format: Format, name: str) -> None:
    """Raise unless ``importance`` fits a weight of ``shape``.

    Raises:
        QkvError: another shape than ``[in]`` or ``[experts, in]``, or a value that is negative or not finite.
    """
    stack = len(shape) == 3 and format.group_size != "tensor"  # where one scale serves all, so does one importance
    wanted = [(shape[-1],)] + ([(shape[0], shape[-1])] if stack else [])
    if tuple(importance.shape) not in wanted:
        sizes = " or ".join(str(list(size)) for size in wanted)
        raise QkvError(f"the importance for {name} has shape {list(importance.shape)}; its weight needs {sizes}")
    if not bool((torch.isfinite(importance) & (importance >= 0)).all()):
        raise QkvError(f"the importance for {name} has values that are negative or not finite; calibrate again")


def search_scales(rows: Tensor, ranges: Range, format: Format, importance: Tensor) -> Scales:
    """Scales under which the weighted squared error of no group is larger than under those that span it.

    Args:
        rows: ``[rows, columns]``, floats; of a stack of experts, the rows of one after those of the other.
        ranges: of its groups.
        format: double quantization is left out of account.
        importance: ``[columns]``, or ``[experts, columns]``.
    """
    if format.group_size == "tensor" or not rows.numel():
        return _search(rows, ranges, format, _row_weights(importance, slice(0, 1), rows))
    parts = [
        _search(rows[part], Range(ranges.low[part], ranges.high[part]), format, _row_weights(importance, part, rows))
        for part in row_chunks(rows.shape[0], rows.shape[1])
    ]
    zeros = [part.zero for part in parts if part.zero is not None]
    return Scales(torch.cat([part.scale for part in parts]), torch.cat(zeros) if zeros else None)


def output_error(x: Tensor, weight: QuantizedTensor | None, importance: Tensor) -> Tensor:
    """Mean squared error that quantizing ``x`` ``[..., out, in]`` brings to each output, float32 ``[..., out]``.

    ``importance`` is ``[in]`` or ``[experts, in]``; inputs are taken as uncorrelated. ``weight`` is what ``x`` became;
    None for the mean squares of the outputs themselves.
    """
    rows = x.detach().reshape(prod(x.shape[:-1]), x.shape[-1])
    back = None if weight is None else weight.dequantize(torch.float32).reshape(rows.shape)
    out = torch.empty(rows.shape[0], device=x.device)
    for part in row_chunks(*rows.shape):
        error = rows[part].to(torch.float32) - (0 if back is None else back[part])
        out[part] = (error.square_() * _row_weights(importance, part, rows)).sum(-1)
    return out.reshape(x.shape[:-1])


def _row_weights(importance: Tensor, part: slice, rows: Tensor) -> Tensor:
    """Importance of the elements of some rows, float32, ``[1, columns]`` where it is the same for all."""
    weights = importance.to(torch.float32).reshape(-1, importance.shape[-1])
    if len(weights) == 1:
        return weights
    return weights[torch.arange(part.start, part.stop, device=rows.device) * len(weights) // rows.shape[0]]


def _search(rows: Tensor, ranges: Range, format: Format, weights: Tensor) -> Scales:
    best = spanning_scales(ranges, format)
    error = _weighted_error(rows, format, best, weights)
    for step in range(1 + NUM_FITS):
        other = _fitted(rows, format, best, weights) if step else _best_ratio(rows, ranges, format, weights)
        best, error = _better(best, error, other, _weighted_error(rows, format, other, weights))
    return best


def _weighted_error(rows: Tensor, format: Format, scales: Scales, weights: Tensor) -> Tensor:
    """Squared errors times weights, summed over each group, ``float32`` of the scales' shape."""
    total = torch.zeros_like(scales.scale)
    for part, groups, weight in _chunks(rows, format, weights):
        own = scales_of(scales, part, groups.shape, format)
        values = decode(encode(groups, own, format), own, format)
        _add(total, values.sub_(groups).square_().mul_(weight).sum(-1), part)
    return total


def _best_ratio(rows: Tensor, ranges: Range, format: Format, weights: Tensor) -> Scales:
    """For each group the best of ``RATIOS``."""
    unit = spanning_scales(ranges, format)
    tried = [spanning_scales(Range(ranges.low * ratio, ranges.high * ratio), format) for ratio in RATIOS]
    errors = torch.zeros((len(RATIOS), *unit.scale.shape), device=rows.device)
    for part, groups, weight in _chunks(rows, format, weights):
        one = _divisor(scales_of(unit, part, groups.shape, format).scale)[..., None]
        scaled = groups.div_(one)
        for scales, error in zip(tried, errors, strict=True):
            own = scales_of(scales, part, groups.shape, format)
            ratio = _divisor(own.scale)[..., None] / one
            values = _snapped(scaled / ratio, own.zero, format).mul_(ratio)
            _add(error, values.sub_(scaled).square_().mul_(weight).sum(-1), part)
    best = errors.argmin(0, keepdim=True)
    zeros = [each.zero for each in tried if each.zero is not None]
    scale = torch.stack([each.scale for each in tried]).gather(0, best)[0]
    return Scales(scale, torch.stack(zeros).gather(0, best)[0] if zeros else None)


def _snapped(scaled: Tensor, zero: Tensor | None, format: Format) -> Tensor:
    """The nearest values that codes can stand for, in units of the scale; ``scaled`` is used up."""
    if format.name == "nf4":
        index = scaled.clamp_(-1, 1).add_(1).mul_(TABLE_STEPS).round_().to(torch.int32)
        return _level_table(scaled.device).index_select(0, index.reshape(-1)).reshape(index.shape)
    if zero is not None:
        shift = zero[..., None].to(torch.float32)
        return scaled.round_().add_(shift).clamp_(0, 2**format.bits - 1).sub_(shift)
    qmax = 2 ** (format.bits - 1) - 1
    return scaled.round_().clamp_(-qmax, qmax)


@cache
def _level_table(device: torch.device) -> Tensor:
    """The NF4 level nearest to each of ``2 * TABLE_STEPS + 1`` values from -1 to 1."""
    values = torch.linspace(-1, 1, 2 * TABLE_STEPS + 1)[None, None]
    one = torch.ones(1, 1)
    return nf4.decode(nf4.encode(values, one), one).flatten().to(device)


def _fitted(rows: Tensor, format: Format, scales: Scales, weights: Tensor) -> Scales:
    """The scales that fit the codes best which ``scales`` give, by weighted least squares."""
    above, below = torch.zeros_like(scales.scale), torch.zeros_like(scales.scale)
    for part, groups, weight in _chunks(rows, format, weights):
        own = scales_of(scales, part, groups.shape, format)
        values = decode(encode(groups, own, format), own._replace(scale=torch.ones_like(own.scale)), format)
        weighted = values * weight
        _add(above, groups.mul_(weighted).sum(-1), part)
        _add(below, weighted.mul_(values).sum(-1), part)
    fitted = above / below
    fits = (fitted >= _TINY) & (fitted <= format.scale_limit)
    return scales._replace(scale=torch.where(fits, fitted, scales.scale))


def _better(first: Scales, error: Tensor, second: Scales, other: Tensor) -> tuple[Scales, Tensor]:
    """Group by group the scales of the smaller error; ``first`` where they are equal."""
    take = other < error
    zero = None if first.zero is None or second.zero is None else torch.where(take, second.zero, first.zero)
    return Scales(torch.where(take, second.scale, first.scale), zero), torch.where(take, other, error)


def _chunks(rows: Tensor, format: Format, weights: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows as fresh float32 groups, and the weights of their elements, a chunk at a time."""
    num_rows, columns = rows.shape
    length = format.group_length(columns)
    shared = to_groups(weights, length) if len(weights) == 1 else None
    for part in row_chunks(num_rows, max(columns, length), CHUNK_ELEMENTS):
        groups = to_groups(rows[part].to(torch.float32, copy=True), length)
        yield part, groups, to_groups(weights[part], length) if shared is None else shared


def _add(total: Tensor, part: Tensor, rows: slice) -> None:
    """Add a chunk's sums ``[rows, groups]`` to the totals of its groups, or all to a single one."""
    if total.numel() == 1:
        total += part.sum()
    else:
        total[rows] += part


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)
