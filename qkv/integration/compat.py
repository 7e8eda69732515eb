"""The one place that asks what the installed transformers is like: names that moved between versions."""

from __future__ import annotations

from functools import cache
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
