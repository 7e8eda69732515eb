"""Tell a transformers model that it is quantized, so that ``save_pretrained`` writes what can be loaded again."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from qkv.integration.compat import saving_conversions

_MARKS = ("hf_quantizer", "is_quantized", "quantization_method", "_weight_conversions")


def is_transformers_model(model: nn.Module) -> bool:
    """Whether ``model`` is a ``PreTrainedModel``, without importing transformers for one that is not."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def announce(model: Any) -> None:
    """Attach the quantization config that describes ``model`` as it is now."""
    if not is_transformers_model(model):
        return
    from qkv.integration.describe import describe, history
    from qkv.integration.hf_quantizer import QkvConfig, QkvHfQuantizer

    config: Any = QkvConfig.from_settings(describe(model), **history(model))
    quantizer = QkvHfQuantizer(config, pre_quantized=True)
    model.config.quantization_config = config
    model.hf_quantizer = quantizer
    conversions = saving_conversions(model)
    if conversions:
        model._weight_conversions = quantizer.update_weight_conversions(conversions, model)


def withdraw(model: nn.Module) -> None:
    """Take everything away that :func:`announce` or loading attached."""
    put_marks(model, ({}, None))


def take_marks(model: nn.Module) -> tuple[dict[str, Any], Any]:
    """What is attached to the model now, for :func:`put_marks`."""
    attached = {name: model.__dict__[name] for name in _MARKS if name in model.__dict__}
    return attached, getattr(getattr(model, "config", None), "quantization_config", None)


def put_marks(model: Any, marks: tuple[dict[str, Any], Any]) -> None:
    """Attach exactly ``marks``."""
    if not is_transformers_model(model):
        return
    attached, config = marks
    for name in _MARKS:
        model.__dict__.pop(name, None)
    model.__dict__.update(attached)
    if config is not None:
        model.config.quantization_config = config
    elif hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
