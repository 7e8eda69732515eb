"""Read compressed-tensors ``pack-quantized``: formats from the config, which one by the tensors' shapes."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, Final

import torch
from torch import Tensor

from qkv.checkpoint.header import TensorEntry
from qkv.checkpoint.layouts.base import Layout, Stored
from qkv.checkpoint.source import Source
from qkv.dtypes import config_dtype
from qkv.errors import CheckpointError, shown
from qkv.quantizers.format import Format
from qkv.quantizers.tensor import QuantizedTensor

PACKED: Final = "_packed"
PARTS: Final = ("_packed", "_scale", "_zero_point", "_shape")


def read_formats(source: Source, config: Mapping[str, Any]) -> list[Format]:
    """The formats of all config groups.

    Raises:
        CheckpointError: naming what cannot be represented.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{source.path}: config_groups in quantization_config is {shown(groups)}, not a mapping")
    sparsity = config.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense"):
        raise _refusal(source, "sparsity_config", sparsity)
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise _refusal(source, key, config[key])
    return list(dict.fromkeys(_read_group(source, group, config.get("format")) for group in groups.values()))


def stored_packed(source: Source, formats: list[Format], layout: Layout) -> list[Stored]:
    """The weights of a directory, those that are packed and the others.

    Raises:
        CheckpointError: tensors that fit none of the formats.
    """
    entries, found, taken = source.entries, {}, set[str]()
    for name in entries:
        if name.endswith("weight_g_idx"):
            raise _refusal(source, "an order of columns of its own (actorder)", name)
        if name.endswith(f".weight{PACKED}"):
            base = name.removesuffix(PACKED)
            parts = {base + part: entries[base + part] for part in PARTS if base + part in entries}
            format, shape = _format_and_shape(base, parts, formats, source)
            found[name] = Stored(base, parts, format, shape, config_dtype(source.config), layout=layout)
            taken |= parts.keys()
    if not found:
        raise CheckpointError(f"{source.path} calls itself compressed and holds no packed tensor")
    return [
        found[name] if name in found else _left_over(entry)
        for name, entry in entries.items()
        if name in found or name not in taken
    ]


def decode_packed(stored: Stored, source: Source) -> QuantizedTensor:
    """Codes in our order, scales in float32: exactly the values that compressed-tensors computes."""
    base, format = stored.name, stored.format
    assert format is not None
    if f"{base}_shape" in stored.entries and tuple(source.read(f"{base}_shape").tolist()) != stored.shape:
        raise CheckpointError(f"{source.path}: {base}_shape does not say {list(stored.shape)}, as its tensors do")
    packed = source.read(base + PACKED).view(torch.uint8)
    rows, columns = stored.shape
    codes = _unpack(packed, format)[:, : ceil(columns * format.bits / 8)]
    grouped = codes.reshape(rows, columns // format.group_length(columns), -1).contiguous()
    scale = source.read(f"{base}_scale").to(torch.float32)
    zero = None if format.symmetric else _zero(source.read(f"{base}_zero_point"), rows, format.bits)
    return QuantizedTensor(format, stored.shape, stored.dtype, grouped, scale, zero)


def _read_group(source: Source, group: Any, default: Any) -> Format:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise _refusal(source, "config group", group)
    kind = group.get("format") or default
    if kind != "pack-quantized":
        raise _refusal(source, "format", kind)
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise _refusal(source, key, group[key])
    if weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8) or weights.get("dynamic"):
        raise _refusal(source, "weights", {key: weights.get(key) for key in ("type", "num_bits", "dynamic")})
    if weights.get("actorder") in (True, "group", "dynamic"):
        raise _refusal(source, "actorder", weights["actorder"])
    size: Any = weights.get("group_size") if weights.get("strategy") == "group" else "row"
    if weights.get("strategy") not in ("group", "channel") or (size != "row" and (type(size) is not int or size < 1)):
        raise _refusal(source, "strategy", {key: weights.get(key) for key in ("strategy", "group_size")})
    return Format("int4" if weights["num_bits"] == 4 else "int8", size, symmetric=bool(weights.get("symmetric", True)))


def _refusal(source: Source, what: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{source.path}: {what} {shown(value)} of compressed-tensors cannot be represented here (pack-quantized "
        "integers of 4 or 8 bits in groups or rows can); use the model's float form"
    )


def _format_and_shape(
    base: str, parts: Mapping[str, TensorEntry], formats: list[Format], source: Source
) -> tuple[Format, tuple[int, ...]]:
    """The one format whose shapes the tensors have; ``weight_shape`` is only read where they leave a doubt."""
    told = None
    if len(formats) > 1 or formats[0].group_size == "row":
        entry = parts.get(f"{base}_shape")
        if entry is not None and entry.shape == (2,) and entry.dtype == torch.int64:
            told = tuple(source.read(entry.name).tolist())
    found = [(format, shape) for format in formats if (shape := _fitting(base, parts, format, told))]
    if len(found) != 1:
        shapes = {name: [str(e.dtype).removeprefix("torch."), list(e.shape)] for name, e in parts.items()}
        raise CheckpointError(
            f"{source.path}: {shown(shapes)} fit {'none' if not found else 'several'} of {', '.join(map(str, formats))}"
        )
    return found[0]


def _fitting(
    base: str, parts: Mapping[str, TensorEntry], format: Format, told: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The float shape if the tensors can be of ``format``."""
    packed, scale, zero = (parts.get(base + part) for part in ("_packed", "_scale", "_zero_point"))
    if packed is None or scale is None or packed.dtype != torch.int32 or not scale.dtype.is_floating_point:
        return None
    if len(packed.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != packed.shape[0]:
        return None
    (rows, groups), row, bits = scale.shape, format.group_size == "row", format.bits
    unpadded = told[1] if told else packed.shape[1] * 32 // bits
    columns = unpadded if row else groups * int(format.group_size)
    if columns < 1 or ceil(columns * bits / 32) != packed.shape[1] or told not in (None, (rows, columns)):
        return None
    if (row and groups != 1) or format.symmetric == (zero is not None):
        return None
    if zero is not None and (zero.dtype != torch.int32 or zero.shape != (ceil(rows * bits / 32), groups)):
        return None
    return rows, columns


def _unpack(packed: Tensor, format: Format) -> Tensor:
    if format.bits == 4:
        return (packed << 4) | (packed >> 4)
    return (packed ^ 128).view(torch.int8) if format.symmetric else packed


def _zero(packed: Tensor, rows: int, bits: int) -> Tensor:
    """Zero points ``[rows, groups]`` as codes; they are packed along the rows, the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts: Tensor = (packed[:, None, :] >> shifts[None, :, None]) & (2**bits - 1)
    return parts.reshape(-1, packed.shape[1])[:rows].to(torch.uint8)


def _left_over(entry: TensorEntry) -> Stored:
    if not entry.dtype.is_floating_point and entry.dtype != torch.bool and len(entry.shape) > 1:
        raise CheckpointError(f"{entry.path}: {entry.name} is {entry.dtype}, and what it belongs to is not known")
    return Stored.plain(entry)
