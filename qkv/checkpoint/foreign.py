"""Load directories that bitsandbytes or compressed-tensors wrote: their codes, packed as they are, in our modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkv.checkpoint.layouts.base import Stored
from qkv.checkpoint.source import Source
from qkv.dtypes import config_dtype
from qkv.errors import CheckpointError
from qkv.integration.compat import checkpoint_renamer, conv1d_class
from qkv.integration.select import select
from qkv.integration.settings import Settings
from qkv.integration.skeleton import build_skeleton, first_line
from qkv.progress import Progress
from qkv.quantizers.embedding import QuantizedEmbedding
from qkv.quantizers.experts import parameter_format
from qkv.quantizers.format import Format

Places = Mapping[str, tuple[str, str]]
"""Names of tensors in the files to the model's module and the parameter in it."""


def skeleton_of(source: Source) -> nn.Module:
    """The model without weights.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    try:
        return build_skeleton(source.directory)
    except Exception as error:  # transformers raises anything for a model that it cannot build
        raise CheckpointError(
            f"{source.path}: which weights are transposed only the model tells, and transformers cannot build it: "
            f"{first_line(error)}"
        ) from error


def with_transposed(weights: list[Stored], model: nn.Module, places: Places) -> list[Stored]:
    """``weights``, those of ``Conv1D`` marked: its weight is the transpose of what is quantized."""
    return [
        replace(stored, transposed=isinstance(_module(model, places[stored.name][0]), conv1d_class() or ()))
        if stored.format
        else stored
        for stored in weights
    ]


def places_of(source: Source, weights: list[Stored], model: nn.Module) -> Places:
    """Where in ``model`` each weight goes."""
    rename: Callable[[str], tuple[str, bool]] = checkpoint_renamer(model)
    found = {stored.name: rename(stored.name) for stored in weights}
    for stored in weights:
        name, reshaped = found[stored.name]
        if stored.format and reshaped and "experts" not in name.split("."):
            raise CheckpointError(
                f"{source.path}: {stored.name} is taken apart while loading, which its codes cannot be; "
                "load its float form"
            )
    return {name: (full.rpartition(".")[0], full.rpartition(".")[2]) for name, (full, _) in found.items()}


def load_foreign(source: Source, weights: list[Stored], dtype: str | torch.dtype, options: Mapping[str, Any]) -> Any:
    """The model of ``weights``, ready to run; ``save_pretrained`` writes it in our own layout.

    Raises:
        CheckpointError: a weight that no module of ours can hold.
    """
    import transformers

    from qkv.integration.hf_quantizer import QkvConfig

    model = skeleton_of(source)
    places = places_of(source, weights, model)
    weights = with_transposed(weights, model, places)
    state, formats = _read(source, weights)
    settings = _settings(source, model, places, {s.name: (formats[s.name], s.shape) for s in weights if s.format})
    config: Any = transformers.AutoConfig.from_pretrained(source.directory, trust_remote_code=False)
    config.quantization_config = QkvConfig.from_settings(settings, **_history(source, weights, places)).to_dict()
    dtype = config_dtype(source.config) if dtype == "auto" else dtype
    loaded, info = type(model).from_pretrained(  # type: ignore[attr-defined]
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **options
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{source.path} lacks {', '.join(missing[:3])} of {len(missing)} tensors; get it again")
    loaded.config.name_or_path = str(source.path)
    if loaded.can_generate() and (source.directory / "generation_config.json").is_file():
        loaded.generation_config = transformers.GenerationConfig.from_pretrained(source.directory)
    return loaded


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _read(source: Source, weights: list[Stored]) -> tuple[dict[str, Tensor], dict[str, Format]]:
    """All tensors under our own layout's names, and the formats they really have."""
    state: dict[str, Tensor] = {}
    formats: dict[str, Format] = {}
    with Progress("reading", source.nbytes) as progress:
        for stored in weights:
            if stored.layout is None:
                state[stored.name] = source.read(stored.name)
            else:
                weight = stored.layout.decode(stored, source)
                state |= weight.state(stored.name)
                formats[stored.name] = weight.format
            progress.advance(stored.name, stored.nbytes)
    return state, formats


def _settings(
    source: Source, model: nn.Module, places: Places, found: Mapping[str, tuple[Format, tuple[int, ...]]]
) -> Settings:
    """Settings under which just the modules of ``found`` are quantized, to their formats."""
    formats = _by_module(source, places, found)
    default = Counter(formats.values()).most_common(1)[0][0]
    targets = select(model, Settings(default, embeddings=replace(default, double_quant=False)))[0]
    strange = formats.keys() - {target.name for target in targets}
    if strange:
        raise CheckpointError(f"{source.path}: {min(strange)} is quantized, and is no layer that can be replaced here")
    tables = {t.name for t in targets if issubclass(t.new_class, QuantizedEmbedding)}
    plain = {t.name for t in select(model, Settings(default))[0]}
    heads = [formats[t.name] for t in targets if t.name not in plain and t.name not in tables and t.name in formats]
    skip = tuple(t.name for t in targets if t.name not in formats and (heads or t.name in plain))
    overrides = {name: format for name, format in formats.items() if format != default}
    return Settings(default, skip, heads[0] if heads else None, overrides)


def _by_module(
    source: Source, places: Places, found: Mapping[str, tuple[Format, tuple[int, ...]]]
) -> dict[str, Format]:
    """The format of each module; of experts that which, fitted to their rows, gives what their tensors have."""
    formats: dict[str, Format] = {}
    for name, (format, _) in found.items():
        module = places[name][0]
        known = formats.setdefault(module, format)
        if isinstance(format.group_size, int) and isinstance(known.group_size, int):
            formats[module] = max(known, format, key=lambda f: int(f.group_size))
    for name, (format, shape) in found.items():
        module, parameter = places[name]
        if parameter_format(f"{module}.{parameter}", formats[module], shape[-1]) != format:
            raise CheckpointError(
                f"{source.path}: {name} is {format} and others of {module} are {formats[module]}; "
                "a module has one format here"
            )
    return formats


def _history(source: Source, weights: list[Stored], places: Places) -> dict[str, Any]:
    """What :func:`qkv.integration.describe.history` reads off a live model."""
    own = config_dtype(source.config)
    quantized = {".".join(places[stored.name]): stored for stored in weights if stored.format}
    transposed = sorted(name for name, stored in quantized.items() if stored.transposed)
    dtypes = {name: str(s.dtype).removeprefix("torch.") for name, s in quantized.items() if s.dtype != own}
    return ({"transposed": transposed} if transposed else {}) | ({"dtypes": dtypes} if dtypes else {})


def foreign_weights(source: Source, weights: list[Stored]) -> list[Stored]:
    """``weights`` with what only the model tells of them.

    Raises:
        CheckpointError: transformers cannot build the model.
    """
    if not any(stored.layout is not None and stored.layout.turns_conv1d for stored in weights):
        return weights
    model = skeleton_of(source)
    return with_transposed(weights, model, places_of(source, weights, model))
