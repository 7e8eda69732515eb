"""Read what transformers and bitsandbytes wrote: NF4 and LLM.int8, kept in the codes they are in."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, gcd, prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qkv.checkpoint.header import TensorEntry
from qkv.checkpoint.layouts.base import Layout, Stored
from qkv.checkpoint.source import Source
from qkv.checkpoint.strict_json import parse_object
from qkv.dtypes import config_dtype, dtype_named
from qkv.errors import CheckpointError, QkvError, shown
from qkv.quantizers import nf4
from qkv.quantizers.double_quant import NestedScale, decode_scale, dynamic_map
from qkv.quantizers.format import NESTED_BLOCK, Format
from qkv.quantizers.packing import pack_nibbles, unpack_nibbles
from qkv.quantizers.tensor import QuantizedTensor

BLOCKS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Elements of a block that ``bitsandbytes.functional.quantize_4bit`` takes."""
BLOB: Final = ".quant_state.bitsandbytes__"
PARTS: Final = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
ROW: Final = Format("int8", "row")


class State(NamedTuple):
    """What the JSON beside NF4 codes says."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nested: bool
    offset: float


def stored_bnb(source: Source, layout: Layout) -> list[Stored]:
    """The weights of a directory, those that have a state or SCB beside them and the others.

    Raises:
        CheckpointError: a part that is missing or does not fit, or a kind of code that has no counterpart here.
    """
    found = (_quantized(entry, source, layout) for entry in source.entries.values())
    weights = {stored.name: stored for stored in found if stored}
    if not weights:
        raise CheckpointError(f"{source.path} calls itself quantized with bitsandbytes and holds no such tensor")
    taken = {name for stored in weights.values() for name in stored.entries}
    return [
        weights[name] if name in weights else _left_over(entry)
        for name, entry in source.entries.items()
        if name in weights or name not in taken
    ]


def decode_rows(stored: Stored, source: Source) -> QuantizedTensor:
    """LLM.int8: SCB holds the largest magnitude of each row."""
    scale = source.read(f"{stored.name.removesuffix('weight')}SCB") / 127
    codes = source.read(stored.name)[:, None]
    return QuantizedTensor(ROW, stored.shape, stored.dtype, codes, scale[:, None])


def _quantized(entry: TensorEntry, source: Source, layout: Layout) -> Stored | None:
    """The weight whose codes are ``entry``; None where it holds no codes."""
    name, entries = entry.name, source.entries
    if f"{name}{BLOB}fp4" in entries:
        raise CheckpointError(f"{entry.path}: {name} is FP4, which has no counterpart here; nf4 can be read")
    blob = entries.get(f"{name}{BLOB}nf4")
    if blob is not None:
        state = _state(name, source)
        _check_parts(entry, entries, state)
        parts = {n: entries[n] for n in (name, *(name + part for part in PARTS), blob.name) if n in entries}
        return Stored(name, parts, _format(state), state.shape, state.dtype, layout=layout)
    module = name.removesuffix("weight")
    scales = entries.get(f"{module}SCB")
    if not name.endswith(".weight") or scales is None:
        return None
    _check_rows(entry, scales)
    known = {n: entries[n] for n in (name, scales.name, f"{module}weight_format") if n in entries}
    if f"{module}weight_format" in entries and int(source.read(f"{module}weight_format")) != 0:
        raise CheckpointError(f"{entry.path}: {name} is tiled for one GPU; save it again with a newer bitsandbytes")
    return Stored(name, known, ROW, entry.shape, config_dtype(source.config), layout=layout)


def _state(name: str, source: Source) -> State:
    entry = source.entries[f"{name}{BLOB}nf4"]
    if entry.dtype != torch.uint8 or entry.nbytes > 10_000:
        raise CheckpointError(f"{entry.path}: {entry.name} is {entry.dtype} of {entry.nbytes} bytes, not a state")
    found = parse_object(source.read(entry.name).numpy().tobytes(), f"{entry.path}: {entry.name}", unique_keys=True)
    block, shape, offset = found.get("blocksize"), found.get("shape"), found.get("nested_offset", 0.0)
    sizes = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 2**40 for n in shape)
    nested = "nested_offset" in found
    if found.get("quant_type") != "nf4" or type(block) is not int or block not in BLOCKS or not sizes:
        raise CheckpointError(f"{entry.path}: {entry.name} is no state of NF4 that is known: {shown(found)}")
    if nested and (found.get("nested_blocksize") != NESTED_BLOCK or not isinstance(offset, float | int)):
        raise CheckpointError(f"{entry.path}: {entry.name} nests its scales as nobody does: {shown(found)}")
    try:
        dtype = dtype_named(str(found.get("dtype")))
    except QkvError as error:
        raise CheckpointError(f"{entry.path}: {entry.name}: {error}") from error
    return State(block, dtype, tuple(shape), nested, float(offset))  # type: ignore[arg-type]


def _format(state: State) -> Format:
    """Groups of ours that hold the blocks exactly: parts of a block where it reaches over the end of a row."""
    size = gcd(state.shape[1], state.block)
    return Format("nf4", size, double_quant=state.nested and size == state.block)


def _check_parts(codes: TensorEntry, entries: Mapping[str, TensorEntry], state: State) -> None:
    name, count = codes.name, prod(state.shape)
    blocks = ceil(count / state.block)
    if codes.nbytes != ceil(count / 2):
        raise CheckpointError(
            f"{codes.path}: {name} has {codes.nbytes} bytes; {list(state.shape)} in NF4 needs {ceil(count / 2)}"
        )
    kind = torch.uint8 if state.nested else torch.float32
    wanted = {".quant_map": ((16,), torch.float32), ".absmax": ((blocks,), kind)}
    if state.nested:
        wanted |= {
            ".nested_absmax": ((ceil(blocks / NESTED_BLOCK),), torch.float32),
            ".nested_quant_map": ((256,), torch.float32),
        }
    for part, (shape, dtype) in wanted.items():
        entry = entries.get(name + part)
        if entry is None or entry.shape != shape or entry.dtype != dtype:
            found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise CheckpointError(f"{codes.path}: {name}{part} is {found}; it needs {dtype} {list(shape)}")


def _check_rows(codes: TensorEntry, scales: TensorEntry) -> None:
    if codes.dtype != torch.int8 or len(codes.shape) != 2:
        raise CheckpointError(f"{codes.path}: {codes.name} is {codes.dtype} {list(codes.shape)}, not rows of int8")
    if scales.dtype != torch.float32 or scales.shape != codes.shape[:1]:
        raise CheckpointError(
            f"{scales.path}: {scales.name} is {scales.dtype} {list(scales.shape)}, not a scale for each of "
            f"{codes.shape[0]} rows"
        )


def _left_over(entry: TensorEntry) -> Stored:
    if entry.dtype in (torch.uint8, torch.int8):
        raise CheckpointError(f"{entry.path}: {entry.name} holds codes but its scales are missing; get the file again")
    return Stored.plain(entry)


def decode_blocks(stored: Stored, source: Source) -> QuantizedTensor:
    """NF4 by rows, with the blocks' scales; finer groups where a block reaches over the end of a row."""
    name, state = stored.name, _state(stored.name, source)
    if not torch.equal(source.read(f"{name}.quant_map"), nf4.levels(torch.device("cpu"))):
        raise CheckpointError(f"{source.path}: {name}.quant_map does not hold the levels of NF4")
    (rows, columns), size = stored.shape, gcd(stored.shape[1], state.block)
    packed = source.read(name).reshape(-1).view(torch.uint8)
    if columns % state.block:
        codes = unpack_nibbles(packed)[: rows * columns].reshape(rows, columns // size, size)
        packed = pack_nibbles(codes)
    codes = packed.reshape(rows, columns // size, -1)
    absmax = source.read(f"{name}.absmax")
    nested = _nested(name, state, absmax, source)
    if isinstance(nested, NestedScale) and size == state.block:
        grid = nested.codes.reshape(rows, columns // size)
        format = Format("nf4", size, double_quant=True)
        return QuantizedTensor(format, stored.shape, stored.dtype, codes, grid, None, nested.absmax, nested.offset)
    scale = decode_scale(nested, float("inf")) if isinstance(nested, NestedScale) else nested
    spread = scale.repeat_interleave(state.block // size)[: rows * columns // size].reshape(rows, columns // size)
    return QuantizedTensor(Format("nf4", size), stored.shape, stored.dtype, codes, spread)


def _nested(name: str, state: State, absmax: Tensor, source: Source) -> NestedScale | Tensor:
    """The scales in 8 bits where ours decode to the same, otherwise as floats."""
    if not state.nested:
        return absmax
    table, blocks = source.read(f"{name}.nested_quant_map"), source.read(f"{name}.nested_absmax")
    offset = torch.tensor(state.offset, dtype=torch.float32)
    scale = table[absmax.int()] * blocks.repeat_interleave(NESTED_BLOCK)[: absmax.numel()] + offset
    same = torch.equal(table, dynamic_map(torch.device("cpu")))
    if same and bool(((scale >= 0) & (scale <= torch.finfo(torch.float32).max)).all()):
        return NestedScale(absmax, blocks, offset)
    return scale
