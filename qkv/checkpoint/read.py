"""What the tensors of a quantized directory stand for, read from its config and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.header import TensorEntry
from qkv.checkpoint.source import Source
from qkv.dtypes import dtype_named
from qkv.errors import CheckpointError, QkvError, shown
from qkv.integration.settings import FORMAT_VERSION, Settings
from qkv.memory.items import Item
from qkv.quantizers.experts import parameter_format
from qkv.quantizers.format import SUFFIXES, Format


@dataclass(frozen=True)
class Stored:
    """One weight of a directory: a plain tensor (no format), or the tensors a quantized one is made of.

    ``shape`` is that of the float weight as it is quantized, ``transposed`` says that the model's own
    parameter has it the other way round.
    """

    name: str
    entries: Mapping[str, TensorEntry]
    format: Format | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


def read_items(path: Path, *, require_weights: bool) -> tuple[list[Item], dict[str, Any], torch.dtype]:
    """Weights, config and float dtype of a directory for a footprint.

    Args:
        path: a model directory or a safetensors file.
        require_weights: whether a folder with nothing but a ``config.json`` is an error.
    """
    if not require_weights and path.is_dir() and not any(path.glob("*.safetensors*")):
        config = Source.config_of(path)
        return [], config, config_dtype(config)
    with Source.open(path) as source:
        items = [_item(stored) for stored in stored_weights(source)]
        return items, source.config, config_dtype(source.config)


def config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The model's float dtype by its config; bfloat16 where none is named."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str):
            return dtype_named(name)
    return torch.bfloat16


def stored_weights(source: Source) -> list[Stored]:
    """The weights of a directory, float ones and those this library quantized.

    Raises:
        CheckpointError: quantized by something else, or tensors that do not fit their format.
    """
    config = source.config.get("quantization_config")
    if not config:
        return [_plain(entry) for entry in source.entries.values()]
    settings = _settings(source, config)
    names = {name for name, entry in source.entries.items() if _is_codes(entry, source)}
    parts = {name + suffix for name in names for suffix in SUFFIXES}
    _refuse_orphans(source, parts)
    return [
        _quantized(name, source, settings, config) if name in names else _unquantized(entry)
        for name, entry in source.entries.items()
        if name not in parts
    ]


def _is_codes(entry: TensorEntry, source: Source) -> bool:
    return not entry.dtype.is_floating_point and f"{entry.name}_scale" in source.entries


def _refuse_orphans(source: Source, parts: set[str]) -> None:
    """Scales whose codes are gone must not pass for weights; a model's own floats may be named like scales."""
    for name, entry in source.entries.items():
        base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), None)
        if base is not None and name not in parts and base not in source.entries:
            raise CheckpointError(f"{entry.path}: {name} is there and its codes {base} are not; get the file again")


def _settings(source: Source, config: Any) -> Settings:
    method = config.get("quant_method") if isinstance(config, dict) else config
    if method != "qkv" or not isinstance(config, dict):
        raise CheckpointError(
            f"{source.path} is quantized with {shown(method)}, which cannot be read here; use its float form"
        )
    version = config.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{source.path} has format_version {shown(version)}, and {FORMAT_VERSION} is what can be read; update qkv"
        )
    kinds = {"skip": list, "overrides": dict, "dtypes": dict, "transposed": list}
    for key, kind in kinds.items():
        if not isinstance(config.get(key, kind()), kind):
            found = shown(config[key])
            raise CheckpointError(f"{source.path}: {key} in quantization_config is no {kind.__name__}: {found}")
    try:
        return Settings.parse(
            config.get("format", ""), config.get("skip"), config.get("embeddings"), config.get("overrides")
        )
    except QkvError as error:
        raise CheckpointError(f"{source.path}: quantization_config: {error}") from error


def _plain(entry: TensorEntry) -> Stored:
    return Stored(entry.name, {entry.name: entry}, None, entry.shape, entry.dtype)


def _unquantized(entry: TensorEntry) -> Stored:
    """A plain tensor of a quantized directory, which holds no bytes but those with scales."""
    if entry.dtype in (torch.uint8, torch.int8) and len(entry.shape) > 2:
        raise CheckpointError(f"{entry.path}: {entry.name} holds codes but its scales are missing; write it again")
    return _plain(entry)


def _quantized(name: str, source: Source, settings: Settings, config: Mapping[str, Any]) -> Stored:
    codes = source.entries[name]
    format, shape = _format_and_shape(name, source, settings)
    layout = format.layout(shape)
    entries = {name + suffix: source.entries.get(name + suffix) for suffix in layout}
    for suffix, (size, dtype) in layout.items():
        entry = entries[name + suffix]
        if entry is None or entry.shape != size or entry.dtype != dtype:
            found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise CheckpointError(f"{codes.path}: {name}{suffix} is {found}; {format} needs {dtype} {list(size)}")
    dtype_name = config.get("dtypes", {}).get(name)
    dtype = dtype_named(str(dtype_name)) if dtype_name else config_dtype(source.config)
    found_entries = {key: entry for key, entry in entries.items() if entry is not None}
    return Stored(name, found_entries, format, shape, dtype, name in config.get("transposed", ()))


def _format_and_shape(name: str, source: Source, settings: Settings) -> tuple[Format, tuple[int, ...]]:
    codes = source.entries[name]
    module = name.rpartition(".")[0]
    asked = next((f for f in (settings.override_for(name), settings.override_for(module)) if f), settings.format)
    *rows, groups, stored = codes.shape if len(codes.shape) > 1 else (0, 0)
    columns = groups * stored * 8 // asked.bits
    described = source.entries.get(f"{name}_shape")
    if described is not None and (described.dtype != torch.int64 or described.shape != (len(codes.shape) - 1,)):
        raise CheckpointError(f"{codes.path}: {name}_shape is {described.dtype} {list(described.shape)}")
    if described is not None:
        shape = tuple(int(size) for size in source.read(f"{name}_shape"))
        if shape[:-1] != tuple(rows) or not columns - groups * stored <= shape[-1] <= columns:
            raise CheckpointError(f"{codes.path}: {name}_shape says {list(shape)} and its codes {list(codes.shape)}")
        return parameter_format(name, asked, shape[-1]), shape
    return parameter_format(name, asked, columns), (*rows, columns)


def _item(stored: Stored) -> Item:
    if stored.format is None:
        return Item(stored.name, None, stored.dtype, stored.shape, stored.nbytes)
    return Item.quantized(stored.name, stored.format, stored.shape)
