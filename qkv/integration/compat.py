"""The one place that asks what the installed transformers is like: names that moved between versions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partialmethod
from typing import Any

from torch import nn


@cache
def conv1d_class() -> type[nn.Module] | None:
    """transformers' ``Conv1D``, GPT-2's linear layer with a transposed weight; None without transformers."""
    try:
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        return None
    found: type[nn.Module] = Conv1D
    return found


def copy_converter(converter: Any, sources: list[str], targets: list[str]) -> Any:
    """A weight converter of the same operations for other names; newer versions also carry its scope along."""
    operations = list(converter.operations)
    if hasattr(converter, "copy"):
        return converter.copy(sources, targets, operations=operations)
    return type(converter)(sources, targets, operations=operations)


def saving_conversions(model: Any) -> list[Any]:
    """The rules by which ``save_pretrained`` will turn the model's parameters into those of its checkpoints."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = getattr(model, "_weight_conversions", None)
    if known is None:
        known = get_model_conversion_mapping(model, add_legacy=False)
        known = [rule for rule in known if type(rule).__name__ != "PrefixChange"]  # says nothing of this model
    return list(known)


def checkpoint_renamer(model: Any) -> Callable[[str], tuple[str, bool]]:
    """A function from a tensor's name in a file to its name in ``model`` and whether it is reshaped on the way.

    Follows transformers' own rules for the model: prefixes, renamings, experts fused into one parameter.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names = dict(model.state_dict())

    def rename(name: str) -> tuple[str, bool]:
        found, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if found not in names and name in names:
            return name, False
        return found, pattern is not None

    return rename


def gguf_options() -> dict[str, Any]:
    """What makes ``from_pretrained(gguf_file=...)`` return plain floats; older versions do so by themselves."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def cache_argument(model: Any) -> str:
    """What this model's ``forward`` and ``generate`` call their cache: ``cache`` in newer versions,
    ``past_key_values`` before."""
    import inspect

    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def stock_layers(config: Any) -> list[Any]:
    """The cache layers transformers itself would make for a model, in the order of its layers."""
    from transformers import DynamicCache

    return list(DynamicCache(config=config).layers)


_INTERLEAVED = frozenset(
    "codegen cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe glm glm4 gptj helium llama4_text".split()
)


def rotary_angles(config: Any) -> tuple[tuple[float, ...], int, str] | None:
    """Radians a position of each rotary pair, trained positions, why keys cannot be turned ("": they can).

    None for a model without rotary positions.
    """
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict) and "full_attention" in parameters:
        parameters = parameters["full_attention"]
    theta = (parameters or {}).get("rope_theta") or getattr(config, "rope_theta", None)
    if theta is None:
        return None
    trained = int(getattr(config, "max_position_embeddings", 2**31))
    kind = (parameters or {}).get("rope_type", "default")
    if config.model_type in _INTERLEAVED:
        return (), trained, f"{config.model_type} interleaves its rotary pairs"
    if kind not in ("default", "linear", "llama3", "yarn"):
        return (), trained, f"rope type {kind!r} has no fixed angles"
    return _frequencies(config, parameters or {}, kind, float(theta)), trained, ""


def _frequencies(config: Any, parameters: dict[str, Any], kind: str, theta: float) -> tuple[float, ...]:
    if kind in ("llama3", "yarn"):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        angles, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        return tuple(angles.tolist())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    dim = int(head_dim * partial)
    factor = float(parameters.get("factor", 1.0)) if kind == "linear" else 1.0
    return tuple(theta ** (-i / dim) / factor for i in range(0, dim, 2))


def step_positions(args: tuple[Any, ...], extra: dict[str, Any]) -> Any:
    """Position ids of a step as newer models hand them to ``Cache.update`` (in ``kwargs=``); or None."""
    found = extra.get("kwargs") or extra
    positions = found.get("position_ids") if isinstance(found, dict) else None
    return positions if positions is not None and getattr(positions, "ndim", 0) == 2 else None


@contextmanager
def no_bars_in_pipes() -> Iterator[None]:
    """Keep transformers' own progress bars to terminals, those that it makes with tqdm directly too."""
    from tqdm import tqdm
    from transformers.utils import logging

    if sys.stderr.isatty():
        yield
        return
    enabled, plain_init = logging.is_progress_bar_enabled(), tqdm.__init__
    logging.disable_progress_bar()
    tqdm.__init__ = partialmethod(plain_init, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = plain_init
        if enabled:
            logging.enable_progress_bar()
