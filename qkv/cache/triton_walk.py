"""Launching the walk over blocks on a GPU: what it serves, its table of addresses, its grid."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qkv.cache.blocks import BlockLayout
from qkv.cache.codec import Codec
from qkv.quantizers.kernels import triton_live

PROGRAMS: Final = 1024
MAX_SPLITS: Final = 32
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Walked(NamedTuple):
    """An online softmax over blocks, not yet divided by its total.

    Args:
        peak, total: float32 ``[batch, heads, rows]``; output: ``[..., value_dim]``.
        observed: sum and length of each block's probabilities, and the maximum they are relative to,
            ``[heads, rows, blocks]``.
    """

    peak: Tensor
    total: Tensor
    output: Tensor
    observed: tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True)
class Pages:
    """Where the blocks of a batch lie, on the device.

    Args:
        runs: int64 ``[runs, 9]``: addresses of codes, scales and zero points (keys before values), blocks, their
            tokens, the number of the first block. The storages must be kept alive by somebody else.
        first_run: int32 ``[batch + 1]``. starts: int64, position of each block's first token.
        longest: runs of the batch row that has most. is_aligned: every address is a multiple of 16.
    """

    layout: BlockLayout
    runs: Tensor
    first_run: Tensor
    starts: Tensor
    longest: int
    is_aligned: bool


class Window(NamedTuple):
    """Which blocks a query sees: keys from ``hidden`` on and, unless None, the ``reach`` newest at ``positions``."""

    hidden: int
    reach: int | None
    positions: Tensor


def refuses(layout: BlockLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why blocks of a layout cannot be walked for queries of ``dtype``."""
    if triton_live.unavailable() is not None:
        return triton_live.unavailable()
    if device.type != triton_live.device_type() or dtype not in DTYPES:
        return "serves float32, bfloat16 and float16 on CUDA"
    for codec, dim in ((layout.keys, layout.key_dim), (layout.values, layout.value_dim)):
        width = dim // _planes(codec)
        if codec.name not in ("int8", "int4"):
            return f"serves int8 and int4 blocks, not {codec.name}"
        if width & (width - 1) or width < 16 or dim % _planes(codec):
            return f"serves widths that are powers of two, not {dim}"
    size = layout.block_size
    if size & (size - 1) or size < 16:
        return f"serves blocks of a power of two of tokens, not {size}"
    if layout.values.axis != "token":
        return "serves values with a scale a token"
    if layout.keys.axis == "channel" and layout.keys.group_length(size) != size:
        return "serves keys with one scale a channel and block"
    return None


def pages(layout: BlockLayout, tables: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> Pages:
    """The tables of a batch's rows, each eight numbers a run and a position a block, on the device."""
    rows, first, starts = array("q"), [0], array("q")
    for runs, positions in tables:
        number = len(starts)
        for at in range(0, len(runs), 8):
            rows.extend([*runs[at : at + 8], number])
            number += runs[at + 6]
        starts.extend(positions)
        first.append(len(rows) // 9)
    longest = max(end - begin for begin, end in itertools.pairwise(first))
    is_aligned = all(rows[at + column] % 16 == 0 for at in range(0, len(rows), 9) for column in range(6))
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 9).to(device, non_blocking=True)
    return Pages(
        layout,
        table,
        torch.tensor(first, dtype=torch.int32).to(device, non_blocking=True),
        torch.tensor(starts, dtype=torch.int64).to(device, non_blocking=True),
        longest,
        is_aligned,
    )


def walk_blocks(
    queries: Tensor,
    pages: Pages,
    dtype: torch.dtype,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    with_mass: bool = False,
) -> Walked:
    """The online softmax of scaled queries over every block.

    Args:
        queries: float32 ``[batch, heads, rows, key_dim]``, contiguous, in the keys' (rotated) channels; ``rows``
            are the queries of a group, token by token within each query head.
        dtype: of the model: bfloat16 is multiplied in bfloat16, anything else in float32.
        window: what is seen; None for everything.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        with_mass: for a batch of one, return what each block got.
    """
    import triton

    from qkv.cache.triton_blocks import join, walk

    batch, heads, rows, _ = queries.shape
    tile = min(64, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, tile)
    splits = max(1, min(PROGRAMS // max(tiles * batch * heads, 1), pages.longest, MAX_SPLITS))
    dim = pages.layout.value_dim
    peaks, totals = (queries.new_empty((splits, batch, heads, rows)) for _ in range(2))
    outputs = queries.new_empty((splits, batch, heads, rows, dim))
    count = pages.starts.shape[0]
    seen = tuple(queries.new_empty((heads, rows, count if with_mass else 0)) for _ in range(3))
    positions = pages.starts if window is None else window.positions
    walk[(tiles, batch * heads, splits)](
        queries, pages.runs, pages.first_run, pages.starts, positions,
        peaks, totals, outputs, *seen,
        rows, positions.shape[0], window.hidden if window else 0, (window.reach if window else None) or 0,
        softcap or 0.0, count,
        ROWS=tile, SPLITS=splits, MASKED=window is not None, REACHES=bool(window and window.reach is not None),
        CAPPED=softcap is not None, OBSERVED=with_mass, ALIGNED=pages.is_aligned,
        **_constants(pages.layout, dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
    peak, total = (queries.new_empty((batch, heads, rows)) for _ in range(2))
    output = queries.new_empty((batch, heads, rows, dim))
    if peak.numel():
        join[(peak.numel(),)](
            peaks, totals, outputs, peak, total, output, peak.numel(),
            SPLITS=splits, DIM=dim, WIDTH=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return Walked(peak, total, output, (seen[0], seen[1], seen[2]) if with_mass else None)


def _constants(layout: BlockLayout, dtype: torch.dtype) -> dict[str, Any]:
    import triton.language as tl

    by_channel = layout.keys.axis == "channel"
    return {
        "HEADS": layout.heads,
        "TOKENS": layout.block_size,
        "KEY_DIM": layout.key_dim,
        "KEY_PLANES": _planes(layout.keys),
        "BY_CHANNEL": by_channel,
        "KEY_GROUPS": 1 if by_channel else layout.key_dim // layout.keys.group_length(layout.key_dim),
        "VALUE_DIM": layout.value_dim,
        "VALUE_PLANES": _planes(layout.values),
        "VALUE_GROUPS": layout.value_dim // layout.values.group_length(layout.value_dim),
        "DTYPE": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        "PRECISION": "ieee",
    }


def _planes(codec: Codec) -> int:
    return 2 if codec.bits == 4 else 1
