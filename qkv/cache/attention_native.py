"""Attention over blocks by the native library: codes are read where they lie, scratch stays small."""

from __future__ import annotations

from array import array
from functools import lru_cache

import torch
from torch import Tensor

from qkv.cache.attention_case import Asked, Attended, turned_anchors, turned_queries
from qkv.cache.blocks import BlockLayout
from qkv.cache.codec import Codec
from qkv.quantizers.kernels import native
from qkv.quantizers.kernels.native_attention import CODECS, MAX_QUERIES, Call, Exact, Side, run

SERVES = f"up to {MAX_QUERIES} queries a row on the CPU in float32, bfloat16 and float16: every codec, mask and mass"


def unavailable() -> str | None:
    """Why it is not live."""
    return native.unavailable()


def refuses(asked: Asked) -> str | None:
    """Why it cannot take a case."""
    queries = asked.queries
    if queries.device.type != "cpu":
        return "runs on the CPU"
    if queries.dtype not in native.DTYPES or asked.view.tail_keys.dtype not in native.DTYPES:
        return f"serves float32, bfloat16 and float16, not {queries.dtype}"
    if not 0 < asked.tokens <= MAX_QUERIES:
        return f"serves up to {MAX_QUERIES} queries; more are faster as matrix products"
    if not asked.scale > 0:
        return "serves scales above 0"
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and queries.requires_grad):
        return "neither traced nor differentiated"
    return None


def attend(asked: Asked) -> Attended:
    """See :func:`qkv.cache.attention.attend`."""
    view, queries = asked.view, _dense(asked.queries)
    heads, tokens, value_dim = view.tail_keys.shape[0], asked.tokens, view.tail_values.shape[2]
    runs, starts = view.table.find(view.blocks)
    call = Call(num_runs=len(runs) // 8, num_blocks=len(starts), runs=_address(runs), starts=_address(starts))
    call.side[0], call.side[1] = _sides(_layout(asked))
    held: list[object] = [runs, starts, queries, _fill_exact(call.tail, view.tail_keys, view.tail_values)]
    _fill_queries(call, asked, queries, held)
    if view.anchors is not None:
        _fill_anchors(call, asked, held)
    output = queries.new_empty(tokens, queries.shape[0], value_dim)
    call.output, call.heads, call.group = output.data_ptr(), heads, queries.shape[0] // heads
    call.tail_start, call.num_open, call.hidden, call.sinks = view.tail_start, view.num_open, view.hidden, view.sinks
    call.reach, call.block_size = view.reach or 0, asked.block_size
    call.scale, call.softcap = asked.scale, asked.softcap or 0.0
    if not asked.with_mass:
        run(call)
        return Attended(output.transpose(0, 1))
    columns = len(starts) + -(-view.tail_keys.shape[1] // asked.block_size)
    mass, focus = torch.empty(tokens, columns), torch.empty(tokens, columns)
    call.mass, call.focus = mass.data_ptr(), focus.data_ptr()
    run(call)
    return Attended(output.transpose(0, 1), mass, focus)


def _fill_queries(call: Call, asked: Asked, queries: Tensor, held: list[object]) -> None:
    call.queries, call.tokens, call.dtype = queries.data_ptr(), asked.tokens, native.DTYPES[queries.dtype]
    call.query_head_stride, call.query_token_stride = queries.stride(0), queries.stride(1)
    if asked.positions is None:
        positions = array("q", range(asked.first_position, asked.first_position + asked.tokens))
        call.positions = _address(positions)
        held.append(positions)
    else:
        call.positions = _hold(asked.positions.to(torch.long), held)
    if asked.open_mask is not None:
        call.open_mask = _hold(asked.open_mask, held)
    if asked.sink_logits is not None:
        call.sink_logits = _hold(asked.sink_logits.float(), held)


def _fill_anchors(call: Call, asked: Asked, held: list[object]) -> None:
    view = asked.view
    assert view.anchors is not None
    if view.anchor_turn is None:
        held.append(_fill_exact(call.anchors, *view.anchors))
        return
    held.append(_fill_exact(call.anchors, *turned_anchors(view, torch.float32)))
    if asked.tokens > 1:
        positions = asked.positions
        if positions is None:
            positions = torch.arange(asked.first_position, asked.first_position + asked.tokens)
        call.anchor_queries = _hold(turned_queries(asked.queries.float(), view, positions), held)


def _fill_exact(to: Exact, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Describe exact tokens ``[heads, tokens, dim]``; returns what must stay alive."""
    held = [_dense(keys), _dense(values)]
    for part, tensor in enumerate(held):
        to.data[part] = tensor.data_ptr()
        to.head_stride[part], to.token_stride[part] = tensor.stride(0), tensor.stride(1)
    to.tokens, to.dtype = keys.shape[1], native.DTYPES[keys.dtype]
    return held


def _layout(asked: Asked) -> BlockLayout:
    view = asked.view
    if view.blocks:
        return view.blocks[0].store.layout
    heads, _, key_dim = view.tail_keys.shape
    exact = Codec("exact")
    return BlockLayout(heads, key_dim, view.tail_values.shape[2], asked.block_size, exact, exact, view.tail_keys.dtype)


@lru_cache(maxsize=256)
def _sides(layout: BlockLayout) -> tuple[Side, Side]:
    return _side(layout, layout.keys, layout.key_dim), _side(layout, layout.values, layout.value_dim)


def _side(layout: BlockLayout, codec: Codec, dim: int) -> Side:
    by_token = codec.axis == "token"
    return Side(
        codec=CODECS[codec.name],
        dtype=native.DTYPES[layout.dtype],
        by_token=by_token,
        rotated=codec.is_rotated,
        dim=dim,
        group=codec.group_length(dim if by_token else layout.block_size),
        row_bytes=dim * layout.dtype.itemsize if codec.is_exact else -(-dim * codec.bits // 8),
    )


def _dense(x: Tensor) -> Tensor:
    """The same with its channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _hold(x: Tensor, held: list[object]) -> int:
    x = x.contiguous()
    held.append(x)
    return x.data_ptr()


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
