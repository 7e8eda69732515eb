"""Double quantization: float32 scales in 8 bits (QLoRA, arXiv 2305.14314).

The scales of a tensor are shifted by their mean and stored, in blocks of 256, as codes of the dynamic
8-bit map of bitsandbytes (Dettmers, 8-bit approximations, arXiv 1511.04561) times the block's absmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qkv.quantizers.format import NESTED_BLOCK
from qkv.quantizers.grouping import from_groups, to_groups


class NestedScale(NamedTuple):
    """Scales in 8 bits: ``codes`` uint8 of the scales' shape, ``absmax`` float32 [blocks], ``offset`` float32 []."""

    codes: Tensor
    absmax: Tensor
    offset: Tensor


def _dynamic_values() -> tuple[float, ...]:
    """Decade ``i`` of seven (1e-6 … 1) is cut into ``2**i`` equal parts, each standing for its middle, once
    with either sign; 0 and 1 complete the table."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += middles.tolist() + (-middles).tolist()
    return tuple(sorted(values))


DYNAMIC_VALUES: Final = _dynamic_values()


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """The 256 sorted values of the signed dynamic map, ``float32 [256]``, from about -0.993 to 1."""
    return torch.tensor(DYNAMIC_VALUES, dtype=torch.float32, device=device)


def nearest_code(scaled: Tensor) -> Tensor:
    """The uint8 codes of the values of :func:`dynamic_map` nearest to float32 ``scaled``, of any shape."""
    table = dynamic_map(scaled.device)
    return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)


def encode_scale(
    scale: Tensor,
    *,
    never_below: bool,
    offset: Tensor | None = None,
    nearest: Callable[[Tensor], Tensor] = nearest_code,
) -> NestedScale:
    """Store float32 scales of any shape in 8 bits.

    Args:
        scale: ``float32``, finite.
        never_below: round each scale up rather than to the nearest code, so that the decoded scale
            still spans its group (integer formats, whose codes are chosen after this step).
        offset: ``float32 []`` to shift by; the mean by default.
        nearest: what takes the nearest code; another library's way of it.
    """
    flat = scale.reshape(1, -1)
    if offset is None:
        offset = flat.mean(dtype=torch.float64).to(torch.float32) if flat.numel() else flat.new_zeros(())
    blocks = to_groups(flat - offset, NESTED_BLOCK)[0]
    absmax = blocks.abs().amax(-1)
    scaled = blocks / torch.where(absmax > 0, absmax, 1.0)[:, None]
    codes = _code_above(scaled) if never_below else nearest(scaled)
    codes = from_groups(codes[None], flat.shape[1]).reshape(scale.shape).clone()  # drops the padding's storage
    return NestedScale(codes, absmax, offset)


def decode_scale(nested: NestedScale, limit: float) -> Tensor:
    """The float32 scales that ``nested`` stands for, of the codes' shape, from 0 to ``limit``.

    Rounding can lift the largest scale of huge weights beyond what keeps their values finite, and push
    a small one among large ones below 0, where it would turn its group's signs round.
    """
    values = dynamic_map(nested.codes.device)[nested.codes.reshape(1, -1).to(torch.int32)]
    blocks = to_groups(values, NESTED_BLOCK)[0] * nested.absmax[:, None]
    scale = from_groups(blocks[None], values.shape[1]) + nested.offset
    return scale.clamp_(min=0, max=limit).reshape(nested.codes.shape)


def _code_above(scaled: Tensor) -> Tensor:
    table = dynamic_map(scaled.device)
    return torch.bucketize(scaled, table, out_int32=True).clamp_(max=len(table) - 1).to(torch.uint8)
