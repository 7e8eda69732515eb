"""Our own layout: every format, under the weight's name and that name plus ``_scale`` and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qkv.checkpoint.header import TensorEntry
from qkv.checkpoint.layouts.base import Layout, Plan, Stored, Weight
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import TensorSpec
from qkv.dtypes import config_dtype, dtype_named
from qkv.errors import CheckpointError, QkvError, shown
from qkv.integration.settings import FORMAT_VERSION, Settings
from qkv.quantizers.experts import parameter_format
from qkv.quantizers.format import SUFFIXES, Format
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor


class Own(Layout):
    """What ``import qkv`` teaches transformers to read."""

    method = "qkv"
    by_rows = True

    def specs(self, weight: Weight) -> list[TensorSpec]:
        """As :meth:`Format.layout` says."""
        layout = weight.format.layout(weight.shape)
        return [TensorSpec(weight.name + suffix, dtype, size) for suffix, (size, dtype) in layout.items()]

    def encode(self, weight: Weight, value: Tensor, importance: Tensor | None) -> dict[str, Tensor]:
        """The quantized tensor's own parts."""
        return quantize_tensor(value, weight.format, importance=importance, name=weight.name).state(weight.name)

    def config(self, plan: Plan) -> dict[str, Any]:
        """The settings, and what the weights were."""
        default = plan.config.get("dtype") or plan.config.get("torch_dtype")
        named = {name: str(weight.dtype).removeprefix("torch.") for name, weight in plan.weights.items()}
        dtypes = {name: dtype for name, dtype in named.items() if dtype != default}
        transposed = sorted(name for name, weight in plan.weights.items() if weight.transposed)
        own = {"quant_method": self.method, "format_version": FORMAT_VERSION, **plan.settings.to_dict()}
        return own | ({"transposed": transposed} if transposed else {}) | ({"dtypes": dtypes} if dtypes else {})

    def stored(self, source: Source, config: Mapping[str, Any]) -> list[Stored]:
        """Codes are what has scales beside it."""
        settings = _settings(source, config)
        names = {name for name, entry in source.entries.items() if _is_codes(entry, source)}
        parts = {name + suffix for name in names for suffix in SUFFIXES}
        _refuse_orphans(source, parts)
        return [
            self._quantized(name, source, settings, config) if name in names else _unquantized(entry)
            for name, entry in source.entries.items()
            if name not in parts
        ]

    def decode(self, stored: Stored, source: Source) -> QuantizedTensor:
        """The parts as they are."""
        assert stored.format is not None
        state = {name: source.read(name) for name in stored.entries}
        return QuantizedTensor.from_state(state, stored.format, stored.shape, stored.dtype, stored.name)

    def _quantized(self, name: str, source: Source, settings: Settings, config: Mapping[str, Any]) -> Stored:
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
        return Stored(name, found_entries, format, shape, dtype, name in config.get("transposed", ()), self)


def _settings(source: Source, config: Mapping[str, Any]) -> Settings:
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


def _is_codes(entry: TensorEntry, source: Source) -> bool:
    return not entry.dtype.is_floating_point and f"{entry.name}_scale" in source.entries


def _refuse_orphans(source: Source, parts: set[str]) -> None:
    """Scales whose codes are gone must not pass for weights; a model's own floats may be named like scales."""
    for name, entry in source.entries.items():
        base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), None)
        if base is not None and name not in parts and base not in source.entries:
            raise CheckpointError(f"{entry.path}: {name} is there and its codes {base} are not; get the file again")


def _unquantized(entry: TensorEntry) -> Stored:
    """A plain tensor of a quantized directory, which holds no bytes but those with scales."""
    if entry.dtype in (torch.uint8, torch.int8) and len(entry.shape) > 2:
        raise CheckpointError(f"{entry.path}: {entry.name} holds codes but its scales are missing; write it again")
    return Stored.plain(entry)


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
