"""Attention over blocks on CUDA: the blocks by a Triton kernel, the exact tokens around them in torch."""

from __future__ import annotations

from array import array
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qkv.cache import attention_torch, triton_walk
from qkv.cache.attention_case import Asked, Attended
from qkv.cache.attention_torch import Scope, Softmax
from qkv.cache.hadamard import spread
from qkv.cache.table import BlockTable
from qkv.cache.triton_walk import Pages, Window, pages, walk_blocks
from qkv.cache.view import RowView
from qkv.quantizers.kernels import triton_live

SERVES = "int8 and int4 blocks on CUDA, values with a scale a token: any number of queries, every mask, and mass"

_PAGES: Final[WeakKeyDictionary[BlockTable, tuple[array[int], Pages]]] = WeakKeyDictionary()
"""Tables that are on the device already, with the numbers they were made of."""


def unavailable() -> str | None:
    """Why it is not live."""
    return triton_live.unavailable()


def refuses(asked: Asked) -> str | None:
    """Why it cannot take a case."""
    blocks = asked.view.blocks
    if not blocks:
        return "there is no sealed block to read"
    layout = blocks[0].store.layout
    if any(block.num_tokens != layout.block_size for block in blocks):
        return "serves blocks of one size"
    if any(block.slab.tensors["keys.codes"].device != asked.queries.device for block in blocks):
        return "some blocks are on another device"
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and asked.queries.requires_grad):
        return "neither traced nor differentiated"
    return triton_walk.refuses(layout, asked.queries.dtype, asked.queries.device)


def attend(asked: Asked) -> Attended:
    """See :func:`qkv.cache.attention.attend`."""
    return attention_torch.attend(asked, walk=_walk)


def _walk(rows: Tensor, state: Softmax, scope: Scope) -> None:
    """Every block's part in the softmax of rows ``[heads, rows, key_dim]``, scaled."""
    view = scope.view
    found = _pages(view, rows.device)
    queries = spread(rows) if found.layout.keys.is_rotated else rows
    result = walk_blocks(
        queries[None].contiguous(),
        found,
        found.layout.dtype,
        window=_window(view, scope),
        softcap=scope.softcap,
        with_mass=scope.with_mass,
    )
    peak = result.peak[0]
    state.absorb(peak, result.total[0], result.output[0])
    if result.observed is not None:
        mass, norms, peaks = result.observed
        shrink = torch.exp(peaks - peak[..., None])
        state.mass.append(mass * shrink)
        state.norms.append(norms * shrink)
        state.peaks.append(peak)


def _pages(view: RowView, device: torch.device) -> Pages:
    runs, starts = view.table.find(view.blocks)
    held = _PAGES.get(view.table)
    if held is None or held[0] is not runs:
        held = runs, pages(view.blocks[0].store.layout, [(runs, starts)], device)
        _PAGES[view.table] = held
    return held[1]


def _window(view: RowView, scope: Scope) -> Window | None:
    """What hides blocks from queries; None where they see all."""
    low = min(block.start for block in view.blocks)
    if low >= view.hidden and (view.reach is None or low > scope.last - view.reach):
        return None
    return Window(view.hidden, view.reach, scope.positions)
